"""What a step costs, in every account of the ledger."""

from tasks.common.ledger import ACCOUNTS, charged_flops, paper_training_flops
from tasks.train.learner.update import UpdateStats
from tasks.train.loop.buffer import Batch
from tasks.train.loop.trainer import Trainer
from tasks.train.rollouts import Estimate, Rollouts


def charge(
    trainer: Trainer, batch: Batch, rollouts: Rollouts, estimate: Estimate, update: UpdateStats
) -> None:
    """Enter the step into the accounts (see the ledger). What was replayed was generated
    before; a rollout is charged once for every epoch."""
    architecture, ledger = trainer.run.policy.architecture, trainer.state.ledger
    ledger.add("generate", **batch.cost.as_account())
    generated = float(batch.fresh.tokens_B().sum())
    epochs = trainer.run.settings.updates.epochs
    updated = epochs * float(rollouts.tokens_B()[estimate.keep_B].sum())
    has_gradient_B = trainer.learner.has_gradient(rollouts, estimate)
    mixed = epochs * float(rollouts.tokens_B()[has_gradient_B].sum())
    has_reference, factor = trainer.learner.reference is not None, trainer.learner.update_factor
    rollout = charged_flops(architecture, generated=generated)
    kept = updated / epochs  # the reference does not change from epoch to epoch
    reference = charged_flops(architecture, reference=kept) if has_reference else 0.0
    flat = paper_training_flops(architecture, generated, has_reference=has_reference)
    ledger.add(
        "score",
        executed=update.reference_flops,
        charged=reference,
        charged_mixed=reference,
        charged_paper=reference,
    )
    ledger.add("score", **dict.fromkeys(ACCOUNTS, batch.judged_flops))
    ledger.add("generate", charged=rollout, charged_mixed=rollout, charged_paper=rollout)
    ledger.add(
        "update",
        executed=update.flops,
        charged=charged_flops(architecture, updated=updated, update_factor=factor),
        charged_mixed=charged_flops(architecture, updated=mixed, update_factor=factor),
        charged_paper=flat - rollout - reference,
        tokens=updated,
        rollouts=epochs * int(estimate.keep_B.sum()),
    )
