"""The section `store`."""

from tasks.common.params import ParamsError, at_least, settings


@settings
class StoreSettings:
    """The section `store`: where sampled rollouts are kept."""

    location: str | None = None  # a folder or s3://bucket/prefix; null: store/ of the data root
    batch_rollouts: int = 2048  # sampled and stored together; a kill loses at most one batch
    logprobs: bool = False  # store every token's log-probability, for methods that replay rollouts

    def __post_init__(self) -> None:
        at_least(1, store__batch_rollouts=self.batch_rollouts)
        scheme, separator, _ = (self.location or "").partition("://")
        if separator and scheme != "s3":
            raise ParamsError("store.location must be null, a folder or s3://bucket/prefix")
