"""The compressed state on one device and everything that changes it. Knows nothing of Transformers."""

from .compaction import settle
from .copies import drop_unused_layers, move_rows, prepare_rows
from .decode import StepAttention
from .forks import fork_store
from .hide import hide_tokens
from .kv_heads import KVHeads
from .prompt import PromptAttention
from .read import Payload, check_integrity, levels, payload, read_tokens
from .recorded import Read, Recorded
from .rollback import RecordedAttention, commit_together
from .state import Changing, Store
from .step import begin_forward, look_together, withdraw
from .transform import check_finite

__all__ = [
    "Changing",
    "KVHeads",
    "Payload",
    "Read",
    "Recorded",
    "RecordedAttention",
    "StepAttention",
    "PromptAttention",
    "Store",
    "begin_forward",
    "check_finite",
    "check_integrity",
    "commit_together",
    "drop_unused_layers",
    "fork_store",
    "hide_tokens",
    "levels",
    "look_together",
    "move_rows",
    "payload",
    "prepare_rows",
    "read_tokens",
    "settle",
    "withdraw",
]
