"""`PrefixStore`: compressed prefixes of requests in memory and on disk, found by their tokens."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.devices import TensorParallel, layer_devices
from ..cache.diffkv_cache import DiffKVCache
from ..cache.inference import ordinary_tensors
from ..cache.io import FORMAT_VERSION
from ..cache.resolve import config_of
from ..cache.snapshot import (
    CacheFileError,
    Snapshot,
    model_fingerprint,
    restore_snapshot,
    snapshot_of_request,
    take_snapshot,
    weights_fingerprint,
)
from ..compat import passing
from ..config import DiffKVConfig
from ..config.files import as_folder
from ..store import Store
from .content import ONE_PER_TOKEN, ContentKeys
from .hierarchy import Hierarchy, PrefixTier, Requests, warn
from .stats import ExpectedPrefix, PrefixEntry, PrefixStats
from .thread import NoThread, make_thread
from .tiers import FolderTier, MemoryTier
from .tokens import as_tokens

TOKEN_IDS = "input_ids"


class _Hit(NamedTuple):
    name: str
    tier: PrefixTier
    snapshot: Snapshot


class PrefixStore:
    """Stores the caches of requests, so that later requests with the same prefix need not recompute it.

        store = PrefixStore(model, device_bytes=1 << 30, folder="prefixes")
        cache = store.lookup(input_ids)
        output = model.generate(input_ids, cache=cache)
        store.insert(output, cache)

    Every tier stores a prefix compressed and whole: the pages, windows and counts of one request. `lookup` copies them
    into a cache that continues as if it had never been stored. A prefix is found by a hash of its tokens, which are
    then compared. What does not fit into device memory goes to host memory, then to the folder. A hit moves it up.

    Eviction follows CaR's score. A request adds 1 to the score of the prefix it will use when `look_ahead` announces
    it, and another 1 when `lookup` dispatches it. Both are taken back when it is inserted or its cache is dropped. The
    prefix with the lowest score is evicted first, then the least recently used one.

    On a CPU, device and host form one tier, "device", with the sum of both limits. Requests are looked up one at a time
    (batch size 1). A store may be used from several threads, and its folder by several processes and models at once.

    Args:
        model: model of the caches. Its weights are sampled only once, so create a new store after changing them.
        config: configuration of the caches, or the name of a preset; None uses `DiffKVConfig.for_model`.
        device_bytes: limit on prefixes in device memory, over all of the model's devices.
        host_bytes: limit on prefixes in page-locked host memory.
        folder: folder for prefixes that do not fit into memory, created if missing; None drops them.
        folder_bytes: limit on the files in the folder, including those of other models; None means no limit.

    Raises:
        ValueError: `model` is not a model, is tensor-parallel or has offloaded weights; a limit is negative; `folder`
            is a file; or `folder_bytes` is given without `folder`.
        UnsupportedModelError: a `DiffKVCache` cannot work with the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: DiffKVConfig | str | None = None,
        *,
        device_bytes: int = 1 << 30,
        host_bytes: int = 0,
        folder: str | os.PathLike | None = None,
        folder_bytes: int | None = None,
    ) -> None:
        limit = math.inf if folder_bytes is None else folder_bytes
        for name, value in (("device_bytes", device_bytes), ("host_bytes", host_bytes), ("folder_bytes", limit)):
            if not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"{name}={value!r} must be a number of bytes, 0 or more.")
        if folder is None and folder_bytes is not None:
            raise ValueError("folder_bytes is given without folder; give the folder, or leave both out.")
        config_of(model)
        if TensorParallel.of(model).size > 1:
            raise ValueError("a prefix store works in one process; load the model without tp_plan.")
        self.model: Any = model
        self.config = DiffKVCache(model, config).config
        self._model, self._weights = model_fingerprint(model.config), weights_fingerprint(model)
        parts = [FORMAT_VERSION, self._model, self._weights, str(model.dtype), self.config.to_dict()]
        self._keys = ContentKeys(model.config)
        self._fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        memory = _memory_tiers(model.device, device_bytes, host_bytes)
        disk = None if folder is None else FolderTier(as_folder("folder", folder), limit)
        self._tiers = Hierarchy(memory, disk, self._fingerprint)
        if folder is not None:
            self._tiers.open_folder()
        self._requests = Requests()
        self._lookups = self._tokens = self._tokens_reused = 0
        self._hits, self._read = ({tier.name: 0 for tier in self._tiers.tiers} for _ in range(2))
        self._lookup_seconds = 0.0
        self._seconds_per_token: float | None = None
        self._lock = threading.RLock()
        self._background: Any = NoThread()

    def start(self) -> None:
        """Starts a thread that moves prefixes while requests are computed, until `stop`.

        When a memory tier is more than 90 % full, the thread moves down the least recently used prefixes that no
        request is waiting for. It moves up the prefixes of announced requests (`look_ahead`) unless others are waiting
        for those it would evict. Continuous batching starts it. Failures are logged and leave the prefix in place.

        Raises:
            ImportError: the serving package, which has the thread, is not installed.
        """
        with self._lock:
            if isinstance(self._background, NoThread):
                self._background = make_thread(self._tiers, self._requests, self._lock)
                weakref.finalize(self, self._background.close)
        self._background.start()

    def stop(self) -> None:
        """Ends the thread once `stop` has been called as often as `start`, and waits for the current move."""
        self._background.stop()

    def flush(self) -> None:
        """Waits until the thread of `start` has nothing left to move."""
        self._background.flush()

    def lookup(self, input_ids: Any, content: Mapping[str, Any] | None = None) -> DiffKVCache:
        """Returns a cache with the longest stored prefix of `input_ids`, to be used with all of `input_ids`.

        At least one token is left to compute. The cache belongs to the caller. It is empty if no prefix was found.

        Args:
            input_ids: the whole prompt, integers [1, tokens] or [tokens], without padding.
            content: all processor outputs except the ids, such as {"pixel_values": ...}. Needed if the prompt has
                placeholders for images, video or audio. Prefixes that extend past the first placeholder are found only
                for equal content. {} means that the placeholders have no content.

        Raises:
            ValueError: the ids are not integers, are in several rows, or have placeholders without `content`.
        """
        ids = as_tokens("input_ids", input_ids)
        whole = self._whole(ids, content)
        with self._session():
            started = time.perf_counter()
            cache, hit = self._resume(ids, content)
            entry = None if hit is None else self._tiers.entries[hit.name]
            self._requests.dispatch(whole, entry, cache)
            if hit is not None and entry is not None:
                self._hits[hit.tier.name] += 1
                self._read[hit.tier.name] += hit.snapshot.bytes
                entry.hits += 1
                self._tiers.note_use(hit.name)
                if hit.tier is not self._tiers.tiers[0]:
                    self._tiers.promote(*hit)
                    self._background.wake()
            self._lookups += 1
            self._tokens += ids.numel()
            self._tokens_reused += cache.get_seq_length()
            self._lookup_seconds += time.perf_counter() - started
        return cache

    def insert(self, input_ids: Any, cache: DiffKVCache, content: Mapping[str, Any] | None = None) -> bool:
        """Stores the tokens that `cache` holds, those of one request, which may still continue.

        A prefix always contains all tokens of the cache. A cache cannot be cut back exactly, as later tokens have
        already affected the levels of earlier ones. To store part of a prompt, use `prefill` with that part.

        Args:
            input_ids: tokens the model was called with, possibly followed by more, such as the last one that `generate`
                returned; integers [1, tokens] or [tokens].
            cache: cache with this store's model and configuration; it stays usable.
            content: content as for `lookup`.

        Returns:
            Whether the store now holds the prefix; False if no tier has room without evicting prefixes of higher rank.

        Raises:
            ValueError: the cache has a different model or configuration, several requests, padding, tokens that
                `input_ids` does not begin with, tokens that may still be taken back, or a Transformers layer that
                cannot be saved; or there are placeholders without `content`.
            HandOverError: a forward with the cache stopped halfway.
        """
        ids = as_tokens("input_ids", input_ids)
        self._check_kind(cache)
        # checks and copies the same state, whatever other threads do
        with cache.stores.between_forwards():
            ids = ids[: self._check_tokens(ids, cache)].clone()
            name = self._name(ids, content)
            with self._session():
                self._requests.finish(cache)
                return self._add(name, ids, lambda: take_snapshot(cache, self._weights))

    def insert_request(self, input_ids: Any, held: Sequence[Store], others: Mapping[int, Any]) -> bool:
        """Stores a request of continuous batching, which is text only.

        Args:
            input_ids: token ids of the request, possibly followed by more, integers [tokens].
            held: stores that together hold every compressed layer of the model.
            others: Transformers' own layers by index.

        Returns:
            Whether the store holds the prefix now.
        """
        ids = as_tokens("input_ids", input_ids)[: held[0].seen].clone()
        name = self._name(ids, {})
        kind = self.config, self._model, self._weights
        with self._session():
            return self._add(name, ids, lambda: snapshot_of_request(held, others, *kind))

    def _add(self, name: str, ids: Tensor, take: Callable[[], Snapshot]) -> bool:
        if name in self._tiers.entries:
            self._tiers.note_use(name)
        elif ids.numel():
            snapshot = take()
            snapshot.tensors[TOKEN_IDS] = ids
            self._tiers.add(name, ids.numel(), snapshot)
            self._background.wake()
        return name in self._tiers.entries

    def prefill(self, input_ids: Any, content: Mapping[str, Any] | None = None) -> bool:
        """Computes and stores a prefix that many requests will begin with, such as a system prompt or a document.

        It does nothing if the prefix is already stored. A request that continues it behaves as if its prompt had been
        run in these two parts, which under compression differs slightly from a single run.

        Args:
            input_ids: all tokens of the prefix, integers [1, tokens] or [tokens].
            content: content as for `lookup`, which is also passed to the model.

        Returns:
            Whether the store holds the prefix now.

        Raises:
            ValueError: the ids are empty, not integers, or in several rows, or have placeholders without `content`.
        """
        ids = as_tokens("input_ids", input_ids)
        if ids.numel() == 0:
            raise ValueError("input_ids holds no tokens; a prefix has at least one.")
        if self.contains(ids, content):
            return True
        cache = self.lookup(ids, content)
        seen, given = cache.get_seq_length(), content
        if content and self._keys.have_placeholders(ids[:seen]):
            given = {name: value for name, value in content.items() if name in ONE_PER_TOKEN}
            if self._keys.have_placeholders(ids[seen:]):
                # models take all images at once, or none
                cache, given = DiffKVCache(self.model.config, self.config), content
        self._compute(ids, cache, given)
        return self.insert(ids, cache, content)

    def look_ahead(
        self, prompts: Sequence[Any], load: bool = True, contents: Sequence[Mapping[str, Any] | None] | None = None
    ) -> list[ExpectedPrefix]:
        """Announces upcoming requests so that their prefixes stay in faster tiers.

        Args:
            prompts: all waiting requests to consider, each as for `lookup`. They replace those of the previous call; an
                empty list announces none. A request is removed when it is looked up.
            load: whether the thread started by `start` moves their prefixes into the first tier.
            contents: content of each prompt, as for `lookup`.

        Returns:
            The prefix that each would find now; none is read.

        Raises:
            ValueError: a prompt is invalid for `lookup`, or `contents` has another length; the store stays unchanged.
        """
        waiting = [as_tokens("prompts", prompt) for prompt in prompts]
        contents = [None] * len(waiting) if contents is None else contents
        if len(contents) != len(waiting):
            raise ValueError(f"contents has {len(contents)} entries for {len(waiting)} prompts; give one for each.")
        requests = list(zip(waiting, contents))
        whole = [self._whole(*request) for request in requests]
        with self._session():
            names = [next(self._candidates(*request), None) for request in requests]
            entries = [None if name is None else self._tiers.entries.get(name) for name in names]
            self._requests.announce(list(zip(whole, entries)))
            tiers = [None if name is None else self._tiers.tier_of(name) for name in names]
            fast = self._tiers.tiers[0]
            slow = [name for name, tier in zip(names, tiers) if name is not None and tier not in (None, fast)]
            self._background.want(slow if load else [])
            loading = [name is not None and self._background.is_loading(name) for name in names]
        return [
            ExpectedPrefix(tier.name if tier else None, tier is fast, coming, entry.length if entry else 0)
            for tier, coming, entry in zip(tiers, loading, entries)
        ]

    @property
    def has_folder(self) -> bool:
        """Whether the store has a folder."""
        return self._tiers.folder is not None

    def save(self) -> None:
        """Copies prefixes from memory into the folder, as long as there is room, so that they outlive the process.

        Raises:
            ValueError: the store has no folder.
        """
        if not self.has_folder:
            raise ValueError("this store has no folder; give PrefixStore one.")
        with self._session():
            self._tiers.save()

    def clear(self) -> None:
        """Removes all prefixes of this model and configuration, also from the folder, but keeps statistics."""
        with self._session():
            self._tiers.remove(list(self._tiers.entries))

    def measure(self, tokens: int = 512) -> float:
        """Measures the seconds per token for a prompt of `tokens` random tokens, for `stats.seconds_saved`.

        The prompt is computed twice, and the second run counts. Attention takes a growing share of longer prompts, so
        longer prefixes save more time than estimated.
        """
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or tokens
        tokens = max(2, min(tokens, limit - 1))
        generator, known = torch.Generator().manual_seed(0), self.model.get_input_embeddings().num_embeddings
        ids = torch.randint(known, (tokens,), generator=generator, device="cpu")
        for _ in range(2):
            started = time.perf_counter()
            self._compute(ids, DiffKVCache(self.model.config, self.config))
            seconds = time.perf_counter() - started
        self._seconds_per_token = seconds / tokens
        return seconds / tokens

    @property
    def stats(self) -> PrefixStats:
        """Statistics so far."""
        with self._lock:
            ahead = self._background.bytes_read
            return PrefixStats(
                lookups=self._lookups,
                hits=dict(self._hits),
                tokens=self._tokens,
                tokens_reused=self._tokens_reused,
                bytes_read={tier: count + ahead.get(tier, 0) for tier, count in self._read.items()},
                bytes_written=dict(self._tiers.written),
                loaded_ahead=self._background.loaded_ahead,
                offloaded=self._background.offloaded,
                disk_errors=self._tiers.disk_errors,
                lookup_seconds=self._lookup_seconds,
                seconds_per_token=self._seconds_per_token,
            )

    def __len__(self) -> int:
        with self._session():
            return len(self._tiers.entries)

    def __bool__(self) -> bool:
        return True

    def contains(self, input_ids: Any, content: Mapping[str, Any] | None = None) -> bool:
        """Returns whether exactly these tokens with this content are stored. Raises `ValueError` like `lookup`."""
        name = self._name(as_tokens("input_ids", input_ids), content)
        with self._session():
            return name in self._tiers.entries

    def __contains__(self, input_ids: Any) -> bool:
        """Returns whether exactly these tokens are stored."""
        return self.contains(input_ids)

    def __iter__(self) -> Iterator[PrefixEntry]:
        """Iterates over all prefixes, starting with the last to be evicted."""
        with self._session():
            sizes = self._tiers.sizes()
            found = []
            for name in self._tiers.by_rank():
                entry = self._tiers.entries[name]
                tiers = [tier for tier, held in sizes.items() if name in held]
                if tiers:
                    size, on_disk = sizes[tiers[0]][name], tiers[-1] == FolderTier.name
                    found.append(PrefixEntry(entry.length, tiers[0], size, on_disk, entry.hits, entry.score))
        return iter(found)

    def __repr__(self) -> str:
        with self._session():
            held, listed = [], self._tiers.sizes()
            for tier in self._tiers.tiers:
                sizes = listed[tier.name]
                limit = "" if tier.limit == math.inf else f" of {tier.limit / 1e6:.1f}"
                held.append(f"{tier.name} {len(sizes)} ({sum(sizes.values()) / 1e6:.1f}{limit} MB)")
            return f"PrefixStore({len(self._tiers.entries)} prefixes: {', '.join(held)})"

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Locks the store within the block, and first notes finished requests and changes by other processes."""
        with self._lock, ordinary_tensors():
            self._requests.settle()
            self._tiers.refresh()
            yield

    def _whole(self, ids: Tensor, content: Mapping[str, Any] | None) -> str:
        """Returns the name of a request. Raises `ValueError` for placeholders without `content`."""
        return self._keys.names(ids, content, [ids.numel()])[ids.numel()]

    def _name(self, ids: Tensor, content: Mapping[str, Any] | None) -> str:
        return f"{self._fingerprint}-{ids.numel()}-{self._whole(ids, content)}"

    def _candidates(self, ids: Tensor, content: Mapping[str, Any] | None) -> Iterator[str]:
        """Yields names of stored prefixes of `ids` that leave a token to compute, longest first."""
        lengths = {entry.length for entry in self._tiers.entries.values() if entry.length < ids.numel()}
        for length, found in sorted(self._keys.names(ids, content, lengths).items(), reverse=True):
            name = f"{self._fingerprint}-{length}-{found}"
            if name in self._tiers.entries:
                yield name

    def _resume(self, ids: Tensor, content: Mapping[str, Any] | None) -> tuple[DiffKVCache, _Hit | None]:
        """Returns a cache that continues from the longest readable prefix, and this prefix or None."""
        for name in self._candidates(ids, content):
            tier = self._tiers.tier_of(name)
            if tier is None:
                continue
            try:
                snapshot = tier.get(name)
                if not self._is_of(snapshot, ids):
                    if self._name(snapshot.tensors.get(TOKEN_IDS, ids[:0]).cpu(), {}) == name:
                        continue  # another prompt with the same hash
                    raise CacheFileError(f"{name} holds other tokens than its name says.")
                cache = restore_snapshot(
                    DiffKVCache, snapshot, self.model, layer_devices(self.model), self.model.device
                )
            except (CacheFileError, FileNotFoundError) as error:
                self._tiers.drop_damaged(name, tier, error, warn)
                continue
            except OSError as error:
                self._tiers.note_fault("a stored prefix cannot be read, so its tokens are computed", error)
                continue
            cache.held_tokens.take_up([(0, snapshot.tensors[TOKEN_IDS][None])], cache.get_seq_length())
            return cache, _Hit(name, tier, snapshot)
        return DiffKVCache(self.model.config, self.config), None

    def _is_of(self, snapshot: Snapshot, ids: Tensor) -> bool:
        """Returns whether a snapshot has this model, this configuration and exactly these tokens."""
        content, tokens = snapshot.content, snapshot.tensors.get(TOKEN_IDS)
        if tokens is None or (content["model"], content["weights"]) != (self._model, self._weights):
            return False
        same = DiffKVConfig.from_dict(content["config"]) == self.config
        return same and torch.equal(tokens.cpu(), ids[: tokens.numel()])

    def _check_kind(self, cache: DiffKVCache) -> None:
        """Raises `ValueError` for a cache of another model or configuration."""
        if not isinstance(cache, DiffKVCache):
            raise ValueError(f"cache is a {type(cache).__name__}; a prefix store holds what a DiffKVCache holds.")
        if cache.model_fingerprint != self._model or cache.config != self.config:
            raise ValueError(
                "cache has another model or configuration than this store; take it from store.lookup, or make a store "
                "for it."
            )

    def _check_tokens(self, ids: Tensor, cache: DiffKVCache) -> int:
        """Returns the number of tokens in `cache`. Raises the errors of `insert`."""
        cache.check_handover()
        length = cache.get_seq_length()
        if length > ids.numel():
            raise ValueError(
                f"input_ids has {ids.numel()} tokens but the cache holds {length}; pass all tokens it was given."
            )
        for store in cache.stores.all:
            if store.batch_size != 1 or not bool(store.padding.mask().all()):
                raise ValueError(
                    "the cache holds several requests, padding or hidden tokens; a prefix store takes one request "
                    "without either."
                )
        cache.held_tokens.check(ids[None], None, length)
        return length

    def _compute(self, ids: Tensor, cache: DiffKVCache, content: Mapping[str, Any] | None = None) -> None:
        """Runs the model so that `cache`, which may already hold the first tokens of `ids`, holds all of them."""
        ids = ids[None].to(self.model.device)
        given = {**(content or {}), "input_ids": ids, "attention_mask": torch.ones_like(ids), **passing(cache)}
        self.model.generate(**given, max_new_tokens=1, do_sample=False, num_beams=1)


def _memory_tiers(device: torch.device, device_bytes: int, host_bytes: int) -> list[MemoryTier]:
    if device.type == "cpu":
        return [MemoryTier("device", device_bytes + host_bytes, device)]
    return [MemoryTier("device", device_bytes, device), MemoryTier("host", host_bytes, device, to_host=True)]
