"""The cost of a step: in every account of the ledger, and in that of the budget."""

from tasks.common.accounting.ledger import ACCOUNTS, paper_training_flops
from tasks.common.accounting.spending import Rows, generation_cost, pass_cost
from tasks.train.data.columns import Bools
from tasks.train.data.rollouts import Rollouts
from tasks.train.learner.update import UpdateStats
from tasks.train.loop.trainer import Trainer
from tasks.train.sampling.collector import Cost


def costs_of(trainer: Trainer, rollouts: Rollouts, account: str) -> dict[str, float]:
    """Return the step's cost in `account` by part: generation, passes before the update (features
    and old log-probabilities), the reference's pass, and the updates. Call this before the update,
    since the learning rate may depend on the spent share of the budget."""
    architecture, learner = trainer.run.policy.architecture, trainer.learner
    is_charged = account == "charged"
    with_gradient_B = learner.has_gradient(rollouts, trainer.slots.loss)
    updated_B: Bools = rollouts.kept_B if is_charged else with_gradient_B
    updated = updated_rows(trainer, rollouts, updated_B)
    of_reference = 0.0
    if learner.reference is not None:
        of_reference = pass_cost(account, learner.reference_architecture, updated)
    features = trainer.features()
    rows, scored = rollouts.rows(), 0.0
    if features is not None:
        computed = rows.apart() if features.reads_whole_rows else rows
        if account == "executed" and features.hidden_layer is not None:
            computed = computed.padded()
        scored = learner.score_cost(account, computed, features)
    has_proximal = trainer.run.settings.correction.proximal is not None
    proximal = has_proximal * pass_cost(account, architecture, rows)
    return {
        "generate": generation_cost(account, architecture, rollouts.rows(~rollouts.replayed_B)),
        "score": scored + proximal,
        "reference": of_reference,
        "update": learner.update_cost(account, updated, trainer.run.settings.updates.epochs),
    }


def updated_rows(trainer: Trainer, rollouts: Rollouts, updated_B: Bools) -> Rows:
    """Return the groups and lengths of the rollouts in `updated_B`, as the update computes them."""
    computed = rollouts.without_tails() if trainer.slots.cuts_rows else rollouts
    return computed.rows(updated_B)


def charge(trainer: Trainer, rollouts: Rollouts, cost: Cost, update: UpdateStats) -> None:
    """Enter the step into the accounts (see the ledger), except for the passes that
    `Trainer.charge_pass` enters. `cost` is that of sampling and judging. The generation of replayed
    rollouts was charged earlier; the update of a rollout is charged once per epoch. `charged_paper`
    is sGPO's flat rate, which covers the initial policy as reference; a teacher's pass is added to
    the reference-free rate."""
    architecture, ledger = trainer.run.policy.architecture, trainer.state.ledger
    epochs = trainer.run.settings.updates.epochs
    is_own = trainer.run.settings.reference.source is None
    has_reference = trainer.learner.reference is not None and is_own
    charged, mixed = (
        costs_of(trainer, rollouts, account) for account in ("charged", "charged_mixed")
    )
    generated = rollouts.rows(~rollouts.replayed_B).num_tokens
    flat = paper_training_flops(architecture, generated, has_reference=has_reference)
    rates = {
        part: {"charged": flops, "charged_mixed": mixed[part], "charged_paper": flops}
        for part, flops in charged.items()
    }
    rates["update"]["charged_paper"] = flat - charged["generate"] - charged["reference"] * is_own
    ledger.add("generate", **cost.as_account(), **rates["generate"])
    ledger.add("score", executed=update.reference_flops, **rates["reference"])
    ledger.add("score", **dict.fromkeys(ACCOUNTS, cost.judged_flops))
    ledger.add(
        "update",
        executed=update.flops,
        **rates["update"],
        tokens=epochs * updated_rows(trainer, rollouts, rollouts.kept_B).num_tokens,
        rollouts=epochs * int(rollouts.kept_B.sum()),
    )
