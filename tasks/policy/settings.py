"""The section `policy`."""

import re
from typing import Any, Literal

from tasks.common.params import ParamsError, at_least, settings
from tasks.ingest.settings import Source
from tasks.models.settings import Lora

HUB = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[\w./-]+)")
PACKAGE = re.compile(r"package://(?P<package>[A-Za-z_]\w*)/(?P<path>(\w[\w.-]*/)*\w[\w.-]*\.gguf)")


@settings
class Family:
    """One entry of `policy.tiny.families`: worked examples to learn from."""

    name: str  # a file of tasks/policy/families
    weight: float  # relative to the others'
    settings: dict[str, Any]  # of that file


@settings
class Model:
    """The section `policy.tiny.model`; heads have 32 dimensions each."""

    num_layers: int = 2  # of the transformer
    hidden_size: int = 128  # of a token's state
    num_heads: int = 4  # of attention
    num_key_value_heads: int = 4  # of attention
    intermediate_size: int = 384  # of the feed-forward layers
    max_length: int = 512  # tokens of prompt and completion


@settings
class Training:
    """The section `policy.tiny.training`."""

    device: Literal["auto", "cpu", "cuda"] = "cpu"  # in bfloat16 on a GPU; a CPU repeats exactly
    autocast: bool = False  # products in bfloat16 on a CPU, too
    max_tokens_per_micro_batch: int | None = None  # of one forward and backward; null: a batch
    tokens: float = 6.0e6  # of prompts and completions; some minutes on one core
    batch_size: int = 16  # examples
    batches_per_bucket: int = 128  # among which examples are sorted by length
    learning_rate: float = 3.0e-3  # at its highest
    warmup_rate: float = 0.05  # share of the tokens
    weight_decay: float = 0.01  # of AdamW
    max_grad_norm: float = 1.0  # above which a gradient is scaled down


@settings
class Finetuning(Training):
    """The section `policy.supervised.training`: as `policy.tiny.training`, with other defaults."""

    tokens: float = 1.0e5  # of prompts and solutions
    batches_per_bucket: int = 8  # among which examples are sorted by length; then it can be resumed
    learning_rate: float = 3.0e-4  # at its highest
    max_tokens_per_micro_batch: int | None = 2048  # of one forward and backward; null: a batch
    lora: Lora | None = None  # adapters that are trained, then added to the weights; in 32 bits

    def __post_init__(self) -> None:
        if self.lora is not None and self.lora.base_bits != 32:
            raise ParamsError(
                "policy.supervised.training.lora.base_bits is 4, which only train.lora supports: "
                "set it to 32"
            )


@settings
class Supervised:
    """The section `policy.supervised`: supervised training on demonstrations of their own, before
    anything is profiled."""

    sources: list[Source]  # of questions with worked solutions, as in ingest.sources
    seed: int = 0  # of the order of the demonstrations
    max_examples: int | None = None  # demonstrations that are used, at most; null: all
    training: Finetuning = Finetuning()  # how it is trained

    def __post_init__(self) -> None:
        if self.max_examples is not None:
            at_least(1, policy__supervised__max_examples=self.max_examples)


@settings
class Tiny:
    """The section `policy.tiny`: the policy that is made here, from scratch."""

    seed: int = 0  # of its weights and examples
    families: list[Family] = []  # needed where the source is `tiny`
    model: Model = Model()  # its architecture, a Qwen3
    training: Training = Training()  # how it is made


@settings
class Policy:
    """The section `policy`."""

    source: str = "tiny"  # tiny (made here) | a folder | x.gguf | hf:// | s3:// | package://
    trust_remote_code: bool = False  # run Python files of the policy
    tiny: Tiny = Tiny()  # used where the source is `tiny`
    supervised: Supervised | None = None  # train it on demonstrations; null: use it as it is

    def __post_init__(self) -> None:
        scheme, separator, _ = self.source.partition("://")
        if separator and scheme not in ("hf", "s3", "package"):
            raise ParamsError(
                f"policy.source is {self.source!r}; choose from: tiny, a folder, "
                "hf://org/name@revision, s3://..., a .gguf file, package://name/file.gguf"
            )
        if scheme == "package" and separator and not PACKAGE.fullmatch(self.source):
            raise ParamsError(
                f"policy.source is {self.source!r}; name a GGUF file of an installed package: "
                "package://name/file.gguf"
            )
        if scheme == "hf" and separator and not HUB.fullmatch(self.source):
            # without a revision, the same parameters could name another model tomorrow
            raise ParamsError(
                f"policy.source is {self.source!r}; name a revision (a commit hash): "
                "hf://org/name@revision"
            )

    @property
    def is_converted(self) -> bool:
        """Return whether the source is a GGUF file, which the stage converts to a folder."""
        return self.source.endswith(".gguf") and not self.source.startswith("s3://")
