"""The step, compiled for each bucket: before serving, beside it, or on demand."""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from jaxllm.engine.buckets import Bucket, BucketGrid
from jaxllm.engine.executables import ExecutableStore, program_name

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
# XLA's compiler recurses deeply: the default stack of a thread is too small for large graphs.
COMPILE_STACK_BYTES = 64 << 20
_stack_lock = threading.Lock()


class StepPrograms:
    """Compiled steps by bucket. One thread calls `choose`; compiling runs in others.

    Args:
        grid: the buckets.
        store: keeps what is compiled.
        lower: traces the step of a bucket (jax.stages.Lowered).
        threads: programs compiled at once before serving.
        background_threads: programs compiled at once beside serving.
        on_demand: nothing is compiled before it is needed, so that doing so is no surprise.

    Attributes:
        num_compiles, num_loaded: programs compiled and read from the store so far.
        num_late_compiles: those compiled while a request waited for them, though not `on_demand`.
    """

    def __init__(
        self,
        grid: BucketGrid,
        store: ExecutableStore,
        lower: Callable[[Bucket], Any],
        *,
        threads: int,
        background_threads: int,
        on_demand: bool,
    ):
        self.grid = grid
        self._store = store
        self._lower = lower
        self._threads = threads
        self._background_threads = background_threads
        self._on_demand = on_demand
        self._compiled: dict[Bucket, Any] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._background: threading.Thread | None = None
        self.num_compiles = 0
        self.num_loaded = 0
        self.num_late_compiles = 0
        # A thread inside the compiler when the interpreter ends would abort the process.
        atexit.register(_wait_at_exit, weakref.ref(self))

    def compile_first(self, progress: Progress | None = None) -> list[Bucket]:
        """Make ready the buckets without which some step could not run, and the smallest ones that are kept.

        The latter make the first request fast.
        """
        first = self.grid.first()
        needed = [b for b in self.grid.start_order() if b in first or self._store.holds(program_name(b))]
        logger.info("programs: %d to serve with, compiled or read from the cache", len(needed))
        with _compile_pool(self._threads) as pool:
            futures = {pool.submit(self._make, bucket): bucket for bucket in needed}
            for done, future in enumerate(as_completed(futures), 1):
                self._add(futures[future], future.result())
                if progress is not None:
                    progress(f"programs ({futures[future]})", done, len(futures))
        return needed

    def compile_rest(self, others: Sequence[Callable[[], bool]]) -> None:
        """Make the finer buckets in the background, after `others`, which say whether they compiled."""
        self._background = threading.Thread(target=self._compile_rest, args=(others,), name="compile", daemon=True)
        self._background.start()

    def _compile_rest(self, others: Sequence[Callable[[], bool]]) -> None:
        try:
            for other in others:
                if self._stop.is_set():
                    return
                compiled = other()
                with self._lock:
                    self.num_compiles += compiled
            # A lone request gains most from the smallest.
            order = dict.fromkeys([*self.grid.smallest(), *reversed(self.grid.buckets())])
            missing = [bucket for bucket in order if bucket not in self._compiled]
            logger.info("%d finer programs come beside serving; until then answers are slower", len(missing))
            start = time.monotonic()
            rest = iter(missing)
            with _compile_pool(self._background_threads) as pool:
                for future in [pool.submit(self._work, rest) for _ in range(self._background_threads)]:
                    future.result()
            if not self._stop.is_set():
                logger.info("all programs are ready (%d) after %.0f s more", len(order), time.monotonic() - start)
        except Exception:  # serving goes on in the larger buckets
            logger.exception("compiling in the background stopped")

    def _work(self, buckets: Iterator[Bucket]) -> None:
        for bucket in buckets:
            if self._stop.is_set():
                return
            self._add(bucket, self._make(bucket))

    def _add(self, bucket: Bucket, compiled: Any) -> None:
        with self._lock:
            self._compiled = {**self._compiled, bucket: compiled}  # replaced whole: readers take no lock

    def _make(self, bucket: Bucket) -> Any:
        loaded = self._store.load(program_name(bucket))
        if loaded is not None:
            with self._lock:
                self.num_loaded += 1
            return loaded
        with self._lock:  # tracing holds the interpreter anyway; only XLA's part runs in parallel
            lowered = self._lower(bucket)
        compiled = lowered.compile()
        with self._lock:
            self.num_compiles += 1
        self._store.save(program_name(bucket), compiled)
        return compiled

    def choose(self, need: Bucket, block_tokens: int) -> Bucket:
        """The cheapest compiled bucket that fits; compiled on the spot when there is none.

        Args:
            need: sizes of a step.
            block_tokens: tokens of a prefill block.
        """
        cost = lambda bucket: bucket.cost(block_tokens)  # noqa: E731
        ready = [bucket for bucket in self._compiled if bucket.fits(need)]
        if ready:
            return min(ready, key=cost)
        fitting = [bucket for bucket in self.grid.buckets() if bucket.fits(need)]
        if not fitting:
            raise AssertionError(f"no bucket of the grid fits {need}")
        bucket = min(fitting, key=cost)
        if not self._on_demand:
            logger.warning("compiling %s while serving", bucket)
            self.num_late_compiles += 1
        self._add(bucket, self._make(bucket))
        return bucket

    def __getitem__(self, bucket: Bucket) -> Any:
        """The program of a bucket that `choose` or `compile_first` gave."""
        return self._compiled[bucket]

    def wait(self) -> None:
        """Block until every bucket of the grid is compiled."""
        if self._background is not None:
            self._background.join()

    def stop(self) -> None:
        """Let go of all programs; in the background those in the compiler are the last."""
        self._stop.set()
        self._compiled = {}


@contextmanager
def _compile_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads with stacks for the compiler; the size is a setting of the process, read as they start."""
    with ThreadPoolExecutor(threads) as pool:
        with _stack_lock:
            old = threading.stack_size(COMPILE_STACK_BYTES)
            started = threading.Barrier(threads + 1)  # an idle thread would be used again instead of a new one
            for _ in range(threads):
                pool.submit(started.wait)
            started.wait()
            threading.stack_size(old)
        yield pool


def _wait_at_exit(reference: "weakref.ref[StepPrograms]") -> None:
    programs = reference()
    if programs is not None:
        programs.stop()
        programs.wait()
