"""Whether the trainer and its engine fit one GPU, asked before any work is done.

Counted is what can be known beforehand: weights (loaded already), gradients, the optimizer's two
moments, and the share that the engine reserves. Left out: activations, which depend on
`train.max_tokens_per_micro_batch`."""

from tasks.common.files import ArtifactError

GIB = 2**30
MOMENTS = 2  # AdamW keeps two numbers a weight


def peak_bytes(parameter_bytes: float, engine_bytes: float, *, sleeps: bool) -> float:
    """The most that training takes beside the loaded weights. Gradients live from the update's
    begin to its end; an engine that sleeps has given its memory back for that time."""
    moments, gradients = MOMENTS * parameter_bytes, parameter_bytes
    return moments + (max(engine_bytes, gradients) if sleeps else engine_bytes + gradients)


def check_memory(
    parameter_bytes: float, engine_bytes: float, free_bytes: float, *, sleeps: bool
) -> None:
    """Raise ArtifactError, with the sums in GiB and what to change, when the trainer and its engine
    do not fit."""
    needed = peak_bytes(parameter_bytes, engine_bytes, sleeps=sleeps)
    if needed <= free_bytes:
        return
    alone = peak_bytes(parameter_bytes, 0.0, sleeps=sleeps)
    rest = max(free_bytes - alone, 0.0) if not sleeps else free_bytes - MOMENTS * parameter_bytes
    advice = (
        f"the engine may take {rest / GIB:.1f} GiB at most: lower engine.memory_fraction"
        + ("" if sleeps else ", or let the engine lend its memory with engine.sleep: true")
        if alone <= free_bytes
        else "that is too much even without the engine: use a smaller policy or a larger GPU"
    )
    raise ArtifactError(
        f"training does not fit this GPU: beside the loaded weights it takes {needed / GIB:.1f} "
        "GiB (gradients "
        f"{parameter_bytes / GIB:.1f}, optimizer {MOMENTS * parameter_bytes / GIB:.1f}, engine "
        f"{engine_bytes / GIB:.1f}), and {free_bytes / GIB:.1f} GiB are free; {advice}"
    )
