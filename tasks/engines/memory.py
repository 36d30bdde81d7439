"""Whether the trainer and its engine fit one GPU, checked before any work is done.

Counts what is known beforehand: weights (loaded already), gradients, the optimizer's two moments,
and the share that the engine reserves. Left out: activations, which depend on
`train.max_tokens_per_micro_batch`."""

from tasks.common.files import ArtifactError

GIB = 2**30
MOMENTS = 2  # AdamW keeps two numbers per weight


def peak_bytes(parameter_bytes: float, engine_bytes: float, *, sleeps: bool) -> float:
    """Return the most memory that training takes besides the loaded weights. Gradients exist only
    during the update; an engine that sleeps has freed its memory for that time."""
    moments = MOMENTS * parameter_bytes
    gradients = parameter_bytes
    return moments + (max(engine_bytes, gradients) if sleeps else engine_bytes + gradients)


def check_memory(
    parameter_bytes: float, engine_bytes: float, free_bytes: float, *, sleeps: bool
) -> None:
    """Raise ArtifactError, with the sizes in GiB and what to change, when the trainer and its
    engine do not fit."""
    needed = peak_bytes(parameter_bytes, engine_bytes, sleeps=sleeps)
    if needed <= free_bytes:
        return
    alone = peak_bytes(parameter_bytes, 0.0, sleeps=sleeps)
    rest = max(free_bytes - alone, 0.0) if not sleeps else free_bytes - MOMENTS * parameter_bytes
    advice = (
        f"the engine may take {rest / GIB:.1f} GiB at most: lower engine.memory_fraction"
        + ("" if sleeps else ", or set engine.sleep: true to free its memory during the update")
        if alone <= free_bytes
        else "that is too much even without the engine: use a smaller policy or a larger GPU"
    )
    raise ArtifactError(
        f"training does not fit this GPU: besides the loaded weights it takes {needed / GIB:.1f} "
        f"GiB (gradients {parameter_bytes / GIB:.1f}, "
        f"optimizer {MOMENTS * parameter_bytes / GIB:.1f}, engine {engine_bytes / GIB:.1f}), and "
        f"{free_bytes / GIB:.1f} GiB are free; {advice}"
    )
