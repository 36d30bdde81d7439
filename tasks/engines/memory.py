"""Whether the trainer and its engine fit one GPU, checked before any work is done.

Counts what is known beforehand: what training allocates besides the loaded weights, and the share
that the engine reserves. Left out: activations and the masks of attention, which depend on
`learner.max_tokens_per_micro_batch`, and the few weights that a backward pass holds twice for a
moment."""

from dataclasses import dataclass

from tasks.common.files import ArtifactError

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2  # bytes
MOMENTS = 2  # AdamW keeps two numbers per weight
MOMENT = {32: FLOAT32, 8: 1 + FLOAT32 / 256}  # bytes of one; in 8 bits 256 share a float32 scale
# bytes of a frozen weight; in 4 bits 64 share a scale of a byte, and 256 scales one in float32
WEIGHT = {32: FLOAT32, 4: 0.5 + 1 / 64 + FLOAT32 / (256 * 64)}
LOGITS_COPIES = 4  # logits, log-probabilities, probabilities, and their product: [n, V] each


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that training allocates besides the loaded weights: AdamW's moments and the reference
    policy for as long as it runs, and weights that are sharded and not loaded yet; gradients,
    autocast's low-precision copy of the weights and the
    logits of a chunk during the update only."""

    moments: float
    reference: float
    gradients: float
    low_precision: float
    logits: float
    weights: float = 0.0

    @property
    def lasting(self) -> float:
        """What is there while the engine samples, too."""
        return self.moments + self.reference + self.weights

    @property
    def update(self) -> float:
        """What exists only during the update."""
        return self.gradients + self.low_precision + self.logits

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "optimizer": self.moments,
            "reference policy": self.reference,
            "gradients": self.gradients,
            "low-precision weights": self.low_precision,
            "logits": self.logits,
        }
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)


def training_memory(
    num_parameters: int,
    num_cast: int,
    vocab_size: int,
    *,
    has_reference: bool,
    tokens_per_chunk: int,
    num_shards: int | None = None,
    num_trained: int | None = None,
    optimizer_bits: int = 32,
) -> TrainingMemory:
    """The memory of training `num_parameters` in float32, of which autocast casts `num_cast`, with
    the logits of `tokens_per_chunk` tokens at once. Where every rank holds one of `num_shards`
    parts of the policy, its weights are not loaded yet; the one layer that is gathered at a time is
    not counted, nor its low-precision copy. `num_trained` are those of adapters, where they alone
    are trained. AdamW's moments have `optimizer_bits`; those of tensors too small for 8 are not
    told apart."""
    weights = FLOAT32 * num_parameters
    trained = weights if num_trained is None else FLOAT32 * num_trained
    moments = MOMENTS * MOMENT[optimizer_bits] * trained / FLOAT32
    if num_shards is not None:
        part = weights / num_shards
        return TrainingMemory(
            moments=moments / num_shards,
            reference=part if has_reference else 0,
            gradients=trained / num_shards,
            low_precision=0,
            logits=LOGITS_COPIES * FLOAT32 * tokens_per_chunk * vocab_size,
            weights=part,
        )
    return TrainingMemory(
        moments=moments,
        reference=weights if has_reference else 0,
        gradients=trained,
        low_precision=BFLOAT16 * num_cast,
        logits=LOGITS_COPIES * FLOAT32 * tokens_per_chunk * vocab_size,
    )


def peak_bytes(training: TrainingMemory, engine_bytes: float, *, sleeps: bool) -> float:
    """Return the most memory that training and its engine take besides the loaded weights. An
    engine that sleeps has freed its memory for the time of the update."""
    together = max(engine_bytes, training.update) if sleeps else engine_bytes + training.update
    return training.lasting + together


def check_memory(
    training: TrainingMemory, engine_bytes: float, free_bytes: float, *, sleeps: bool
) -> None:
    """Raise ArtifactError, with the sizes in GiB and what to change, when the trainer and its
    engine do not fit."""
    needed = peak_bytes(training, engine_bytes, sleeps=sleeps)
    if needed <= free_bytes:
        return
    alone = peak_bytes(training, 0.0, sleeps=sleeps)
    rest = max(free_bytes - (training.lasting if sleeps else alone), 0.0)
    advice = (
        f"the engine may take {rest / GIB:.1f} GiB at most: lower engine.memory_fraction"
        + ("" if sleeps else ", or set engine.sleep: true to free its memory during the update")
        if alone <= free_bytes
        else "that is too much even without the engine: use a smaller policy or a larger GPU, or "
        "lower learner.tokens_per_logprob_chunk where the logits are what is large"
    )
    raise ArtifactError(
        f"training does not fit this GPU: besides the loaded weights it takes {needed / GIB:.1f} "
        f"GiB ({training}, engine {engine_bytes / GIB:.1f}), and "
        f"{free_bytes / GIB:.1f} GiB are free; {advice}"
    )
