"""The compressed state on one device and everything that changes it. Knows nothing of Transformers."""

from .compaction import settle
from .copies import drop_unused_layers, fork_store, move_rows, prepare_rows, select_rows
from .decode import SharedStep, attend_token
from .forms import check_finite
from .hide import hide_tokens
from .prompt import attend_tokens
from .read import Payload, check_integrity, levels, payload, read_tokens
from .readers import SharedTokens
from .recorded import Read, Recorded
from .rollback import SharedRecording, attend_recorded, commit
from .state import KVHeads, Store
from .step import begin_forward, withdraw

__all__ = [
    "KVHeads",
    "Payload",
    "Read",
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
    "settle",
    "withdraw",
]
