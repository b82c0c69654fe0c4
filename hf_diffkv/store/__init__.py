"""The state of one device and everything that changes it. Knows nothing of Transformers."""

from .decode import attend_token
from .fork import begin_forward, fork_store
from .prompt import attend_tokens
from .read import Payload, check_integrity, levels, payload, read_tokens
from .record import Recorded, attend_recorded, commit
from .rows import select_rows
from .state import Store

__all__ = [
    "Payload",
    "Recorded",
    "Store",
    "attend_recorded",
    "attend_token",
    "attend_tokens",
    "begin_forward",
    "check_integrity",
    "commit",
    "fork_store",
    "levels",
    "payload",
    "read_tokens",
    "select_rows",
]
