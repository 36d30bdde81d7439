"""What a step costs: in every account of the ledger, and in that of the budget."""

from dataclasses import dataclass

from tasks.common.ledger import ACCOUNTS, paper_training_flops
from tasks.common.spending import GENERATED, generation_cost, pass_cost
from tasks.train.learner.update import UpdateStats
from tasks.train.loop.buffer import Batch
from tasks.train.loop.trainer import Trainer
from tasks.train.rollouts import Bools, Estimate, Rollouts


@dataclass(frozen=True)
class StepCosts:
    """What a step's rows cost in one account: generating them, the passes that a slot or several
    updates ask for, the reference's pass, and the updates."""

    generate: float
    observe: float
    reference: float
    update: float


def costs_of(
    trainer: Trainer, batch: Batch, rollouts: Rollouts, estimate: Estimate, account: str
) -> StepCosts:
    """Return what the step costs in the account. It is known before the update, whose learning rate
    may follow the share of the budget that is spent."""
    architecture, learner = trainer.run.policy.architecture, trainer.learner

    def of_pass(chosen: Rollouts) -> float:
        return pass_cost(account, architecture, chosen.rows())

    is_charged = account == "charged"
    updated_B: Bools = estimate.keep_B if is_charged else learner.has_gradient(rollouts, estimate)
    update = of_pass(rollouts.where(updated_B))
    num_passes = learner.update_factor * trainer.run.settings.updates.epochs
    return StepCosts(
        generation_cost(account, architecture, batch.fresh.rows()),
        trainer.num_observing_passes * of_pass(rollouts),
        update if learner.reference is not None else 0.0,
        num_passes * update,
    )


def spend(trainer: Trainer, batch: Batch, rollouts: Rollouts, estimate: Estimate) -> None:
    """Count the step in the account of the budget, if there is one: `batch.progress` is then the
    share of the budget that is spent with it."""
    buffer, spending = trainer.buffer, trainer.buffer.spending
    if spending is None:
        return
    account = spending.budget.account
    costs = costs_of(trainer, batch, rollouts, estimate, account)
    judged = 0.0 if account in GENERATED else batch.judged_flops
    batch.spent = judged + sum(vars(costs).values())
    buffer.progress = batch.progress = min(buffer.spent / spending.budget.amount, 1.0)


def charge(
    trainer: Trainer, batch: Batch, rollouts: Rollouts, estimate: Estimate, update: UpdateStats
) -> None:
    """Enter the step into the accounts (see the ledger), but for the passes of `Trainer.look`,
    which enters them itself. What was replayed was generated before; a rollout is charged once for
    every epoch."""
    architecture, ledger = trainer.run.policy.architecture, trainer.state.ledger
    epochs = trainer.run.settings.updates.epochs
    has_reference = trainer.learner.reference is not None
    charged, mixed = (
        costs_of(trainer, batch, rollouts, estimate, account)
        for account in ("charged", "charged_mixed")
    )
    generated = batch.fresh.rows().num_tokens
    flat = paper_training_flops(architecture, generated, has_reference=has_reference)
    ledger.add("generate", **batch.cost.as_account())
    ledger.add(
        "generate",
        charged=charged.generate,
        charged_mixed=mixed.generate,
        charged_paper=charged.generate,
    )
    ledger.add(
        "score",
        executed=update.reference_flops,
        charged=charged.reference,
        charged_mixed=mixed.reference,
        charged_paper=charged.reference,
    )
    ledger.add("score", **dict.fromkeys(ACCOUNTS, batch.judged_flops))
    ledger.add(
        "update",
        executed=update.flops,
        charged=charged.update,
        charged_mixed=mixed.update,
        charged_paper=flat - charged.generate - charged.reference,
        tokens=epochs * rollouts.where(estimate.keep_B).rows().num_tokens,
        rollouts=epochs * int(estimate.keep_B.sum()),
    )
