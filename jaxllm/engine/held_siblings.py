"""HeldSiblings: sequences that wait until a sibling has computed their common prompt. Host only."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from jaxllm.engine.request import Sequence


class HeldSiblings:
    """Per request a leader, which runs, and the followers, which then find its pages in the prefix cache."""

    def __init__(self):
        self._followers: dict[str, tuple[Sequence, list[Sequence]]] = {}

    def hold(self, sequences: SequenceOf[Sequence], *, longer_than: int) -> list[Sequence]:
        """Hold all but the first sequence of each request; returns those that need not wait.

        Prompts of at most `longer_than` tokens have no page to share, and who must not read the prefix
        cache gains nothing: they are not held.
        """
        free: list[Sequence] = []
        for sequence in sequences:
            entry = self._followers.get(sequence.request_id)
            if entry is not None:
                entry[1].append(sequence)
                continue
            free.append(sequence)
            if len(sequence.prompt_tokens) > longer_than and not sequence.skip_prefix_cache_read:
                self._followers[sequence.request_id] = (sequence, [])
        for sequence in free:
            if sequence.request_id in self._followers and not self._followers[sequence.request_id][1]:
                del self._followers[sequence.request_id]
        return free

    def remove(self, sequence: Sequence) -> bool:
        """Take out a follower; False when it is none."""
        entry = self._followers.get(sequence.request_id)
        if entry is None or sequence not in entry[1]:
            return False
        entry[1].remove(sequence)
        if not entry[1]:
            del self._followers[sequence.request_id]
        return True

    def release(self, leader: Sequence) -> list[Sequence]:
        """The followers that can go on: all once the leader's prompt is computed (and registered).

        When the leader ended before, the first follower takes its place.
        """
        entry = self._followers.get(leader.request_id)
        if entry is None or entry[0] is not leader:
            return []
        held = entry[1]
        if leader.num_computed_tokens >= len(leader.prompt_tokens):
            ready, rest = held, []
        elif leader.is_finished:
            ready, rest = held[:1], held[1:]
        else:
            return []
        if rest:
            self._followers[leader.request_id] = (ready[0], rest)
        else:
            del self._followers[leader.request_id]
        return ready

    def __len__(self) -> int:
        return sum(len(held) for _, held in self._followers.values())

    def __bool__(self) -> bool:
        return bool(self._followers)

    def __iter__(self) -> Iterator[Sequence]:
        for _, held in self._followers.values():
            yield from held
