"""Every exception a user of autotp can meet.

Each message says what happened, where (module path, file:line of the model's own code) and what to do next.
"""


class AutotpError(Exception):
    """Base of all errors raised by autotp. `module`: the path of the module it concerns, if there is one."""

    module: str | None = None

    def at(self, module: str) -> "AutotpError":
        """This error, told of its module."""
        self.module = module
        return self


class CaptureError(AutotpError):
    """The model could not be recorded."""


class PlanError(AutotpError):
    """No correct plan exists for what was asked."""


class PolicyError(AutotpError):
    """A policy is malformed, matches nothing, or contradicts the model's dataflow."""


class PatchError(AutotpError):
    """A module's own forward could not be rewritten at a call site."""


class RankError(AutotpError):
    """Ranks disagree, or another rank failed."""


class AbsentError(AutotpError):
    """A value was needed on a pipeline stage that does not have it."""


class VerifyError(AutotpError):
    """A plan did not reproduce the unsharded model."""


class LaunchError(AutotpError):
    """The processes were not started as asked: no torchrun, or a world size that tp does not divide."""


class TrainError(AutotpError):
    """A batch, loss or schedule that `train_step` can't make a training step of."""


class LayoutError(AutotpError):
    """A layout does not describe the tensor it is used on."""


class LayerError(AutotpError):
    """A leaf module cannot be split the way that was asked."""


class ShardStateError(AutotpError):
    """A sharded parameter is not what the model's shard state says it is."""


class ModelSourceError(AutotpError):
    """What was given as a model on the command line is none."""


class SearchError(AutotpError):
    """What was asked of the search is inconsistent: no such cluster, or degrees that do not fit."""


class CheckpointError(AutotpError):
    """A checkpoint can't be read or written: entries missing, unexpected, of another shape, or damaged."""
