"""The state of one device and everything that changes it. Knows nothing of Transformers."""

from .decode import attend_token
from .finite import check_finite
from .fork import begin_forward, fork_store
from .hide import check_shown, hide_tokens
from .prompt import attend_tokens
from .read import Payload, check_integrity, levels, payload, read_tokens
from .record import Recorded, SharedRecording, attend_recorded, commit
from .rows import drop_unused_layers, move_rows, prepare_rows, select_rows
from .shared import SharedStep, SharedTokens
from .state import Store

__all__ = [
    "Payload",
    "Recorded",
    "SharedRecording",
    "SharedStep",
    "SharedTokens",
    "Store",
    "attend_recorded",
    "attend_token",
    "attend_tokens",
    "begin_forward",
    "check_finite",
    "check_integrity",
    "check_shown",
    "commit",
    "drop_unused_layers",
    "fork_store",
    "hide_tokens",
    "levels",
    "move_rows",
    "payload",
    "prepare_rows",
    "read_tokens",
    "select_rows",
]
