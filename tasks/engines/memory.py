"""The check that the trainer and its engine fit one GPU, before any work starts.

It counts the memory that can be computed beforehand: the allocations of training besides the loaded
weights, and the share that the engine reserves. It omits activations and attention masks, which
depend on `learner.max_tokens_per_micro_batch`, and the few weights that a backward pass briefly
stores twice."""

from dataclasses import dataclass

from tasks.common.files import ArtifactError

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2  # bytes
MOMENTS = 2  # AdamW keeps two numbers per weight
MOMENT = {32: FLOAT32, 8: 1 + FLOAT32 / 256}  # bytes; in 8 bits 256 moments share a float32 scale
# bytes of a frozen weight; in 4 bits 64 share a 1-byte scale, and 256 scales share one in float32
WEIGHT = {32: FLOAT32, 4: 0.5 + 1 / 64 + FLOAT32 / (256 * 64)}
LOGITS_COPIES = 4  # logits, log-probabilities, probabilities, and their product: [n, V] each


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that training allocates besides the loaded weights. AdamW's moments and the reference
    policy stay for the whole run. So do sharded weights, which are counted because they are not
    loaded yet. Gradients, autocast's low-precision copy of the weights and the logits of a chunk
    exist only during the update."""

    moments: float
    reference: float
    gradients: float
    low_precision: float
    logits: float
    weights: float = 0.0

    @property
    def lasting(self) -> float:
        """Bytes that stay allocated while the engine samples."""
        return self.moments + self.reference + self.weights

    @property
    def update(self) -> float:
        """Bytes allocated only during the update."""
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
    num_reference: int,
    tokens_per_chunk: int,
    num_shards: int | None = None,
    num_trained: int | None = None,
    optimizer_bits: int = 32,
) -> TrainingMemory:
    """Return one rank's memory for training `num_parameters` in float32, beside a reference of
    `num_reference` parameters (0 without one). Autocast casts `num_cast` of the policy's
    parameters. The logits of `tokens_per_chunk` tokens are in memory at once. If the policy is
    split over `num_shards` ranks, its weights are counted, because they are not loaded yet; the
    layer that is gathered at a time is not. `num_trained` is the number of adapter parameters if
    only these are trained. AdamW's moments have `optimizer_bits` each, also in small tensors."""
    weights = FLOAT32 * num_parameters
    trained = weights if num_trained is None else FLOAT32 * num_trained
    moments = MOMENTS * MOMENT[optimizer_bits] * trained / FLOAT32
    is_sharded = num_shards is not None
    num_parts = num_shards or 1
    return TrainingMemory(
        moments=moments / num_parts,
        reference=FLOAT32 * num_reference / num_parts,
        gradients=trained / num_parts,
        low_precision=0 if is_sharded else BFLOAT16 * num_cast,
        logits=LOGITS_COPIES * FLOAT32 * tokens_per_chunk * vocab_size,
        weights=weights / num_parts if is_sharded else 0,
    )


def peak_bytes(training: TrainingMemory, engine_bytes: float, *, sleeps: bool) -> float:
    """Return the peak memory of training and its engine besides the loaded weights. An engine that
    sleeps frees its memory during the update."""
    together = max(engine_bytes, training.update) if sleeps else engine_bytes + training.update
    return training.lasting + together


def check_memory(
    training: TrainingMemory, engine_bytes: float, free_bytes: float, *, sleeps: bool
) -> None:
    """Raise ArtifactError, with the sizes in GiB and the settings to change, if the trainer and its
    engine do not fit."""
    needed = peak_bytes(training, engine_bytes, sleeps=sleeps)
    if needed <= free_bytes:
        return
    alone = peak_bytes(training, 0.0, sleeps=sleeps)
    rest = max(free_bytes - (training.lasting if sleeps else alone), 0.0)
    advice = (
        f"the engine may use {rest / GIB:.1f} GiB at most: lower engine.memory_fraction"
        + ("" if sleeps else ", or set engine.sleep: true to free its memory during the update")
        if alone <= free_bytes
        else "that is too much even without the engine: use a smaller policy or a larger GPU, or "
        "lower learner.tokens_per_logprob_chunk if the logits are large"
    )
    raise ArtifactError(
        f"training does not fit this GPU: besides the loaded weights it needs {needed / GIB:.1f} "
        f"GiB ({training}, engine {engine_bytes / GIB:.1f}), and "
        f"{free_bytes / GIB:.1f} GiB are free; {advice}"
    )
