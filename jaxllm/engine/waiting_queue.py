"""WaitingQueue: sequences that wait for a slot, in order of service, kept apart by size. Host only."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from operator import attrgetter

from jaxllm.engine.request import Sequence

KEY = attrgetter("key")


class WaitingQueue:
    """Sorted queues by size class of the tokens to compute.

    Class 0 fits into `short_tokens`; each further class is about four times larger. A prompt queues
    behind those of its own class only, which bounds what a short one can be made to wait for.
    """

    def __init__(self, short_tokens: int, max_tokens: int):
        self._short_tokens = short_tokens
        self._queues: list[list[Sequence]] = [[] for _ in range(self.size_class(max_tokens) + 1)]

    @property
    def num_classes(self) -> int:
        return len(self._queues)

    def size_class(self, num_tokens: int) -> int:
        """Class of a sequence with so many tokens to compute."""
        if num_tokens <= self._short_tokens:
            return 0
        return 1 + ((num_tokens - 1) // self._short_tokens).bit_length() // 2

    def add(self, sequence: Sequence) -> None:
        insort(self._queues[self.size_class(sequence.num_tokens)], sequence, key=KEY)

    def remove(self, sequence: Sequence) -> None:
        for queue in self._queues:
            # A preempted sequence may have grown out of its class while it waited: look in all.
            index = bisect_left(queue, sequence.key, key=KEY)
            if index < len(queue) and queue[index] is sequence:
                del queue[index]
                return
        raise AssertionError(f"{sequence} is not in the waiting queue")

    def first(self, size_class: int) -> Sequence | None:
        """The next one of a class."""
        queue = self._queues[size_class]
        return queue[0] if queue else None

    def first_of(self, classes: Collection[int]) -> Sequence | None:
        """The next one of several classes."""
        heads = [self._queues[size_class][0] for size_class in classes if self._queues[size_class]]
        return min(heads, key=KEY, default=None)

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues:
            yield from queue
