"""Memory of `LocalEngine`: blocks of rows that run, and of texts that are kept because others may begin alike."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlib.inference._pages import Caches
from maxlib.inference._requests import Request

_SHORTEST_PREFIX = 16  # tokens that are worth copying instead of computing them


@dataclasses.dataclass
class Prefill:
    """A text that is being computed, chunk by chunk: a prompt, and what was drawn of it before its blocks were needed.

    Attributes:
        request: Whose text it is.
        text: The text.
        slot: The slot that it will have.
        shared: Blocks that have its beginning.
        num_blocks: Number of blocks for which `caches` has room.
        caches: Caches of one row.
        hidden: Hidden state of its last token.
        num_done: Number of tokens computed.
        routes: Their routes in pieces, if they are recorded.
    """

    request: Request
    text: list[int]
    slot: int
    shared: list[int]
    num_blocks: int
    caches: Caches | None = None
    hidden: Any = None
    num_done: int = 0
    routes: list[Any] = dataclasses.field(default_factory=list)


class Memory:
    """Blocks, each with the number of those who hold it: rows that run, texts kept for reuse, and the last prompt.

    Args:
        block: Tokens of a block.

    Attributes:
        size: Maximum number of tokens in a row.
        cached: Rows whose tokens are kept, also while they run, the least recently used first.
        prompt: The last prompt that was computed, for its next completion.
    """

    def __init__(self, block: int):
        self.block, self.size = block, 0
        self.cached: list[Request] = []
        self.prompt: Prefill | None = None
        self._num_holders: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        """Returns the number of blocks that nobody holds."""
        return len(self._free)

    def grow(self, size: int, num_blocks: int) -> None:
        """Makes room for rows of `size` tokens, and adds free blocks up to a number of all."""
        self.size = size
        self._free += range(len(self), num_blocks)
        self._num_holders += [0] * (num_blocks - len(self))

    def num_blocks(self, length: int) -> int:
        """Returns the number of blocks that hold `length` tokens."""
        return -(-length // self.block)

    def num_read(self, length: int) -> int:
        """Returns the number of blocks that a program reads for rows of up to `length` tokens: few numbers, so that
        similar lengths share a program.
        """
        least = max(256 // self.block, 1)
        return min(max(least, 1 << (self.num_blocks(length) - 1).bit_length()), self.size // self.block)

    def take(self, count: int) -> list[int]:
        """Returns free blocks, which have one holder from now on."""
        taken = [self._free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a holder of each block."""
        for block in blocks:
            self._num_holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a holder of each block."""
        for block in blocks:
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._free.append(block)

    def make_room(self, count: int) -> bool:
        """Frees blocks of texts that are only kept for reuse, the least recently used first, until `count` are free."""
        while self.num_free < count:
            ended = next((row for row in self.cached if row.done), None)
            if ended is not None:
                self.forget(ended)
            elif self.prompt is not None and self.prompt.shared:
                self.keep_prompt(None)
            else:
                return False
        return True

    def end(self, row: Request) -> None:
        """Releases the blocks of a row that has ended, unless its text is kept."""
        if row not in self.cached:
            self.release(row._blocks)
            row._blocks = []

    def forget(self, row: Request) -> None:
        """Keeps the text of a row no longer, and releases its blocks unless it runs."""
        if row in self.cached:
            self.cached.remove(row)
        if row.done:
            self.end(row)

    def forget_all(self) -> None:
        """Keeps no text."""
        for row in list(self.cached):
            self.forget(row)
        self.keep_prompt(None)

    def keep_prompt(self, job: Prefill | None) -> None:
        """Keeps a computed prompt for its next completion, instead of the last one."""
        if self.prompt is not None:
            self.release(self.prompt.shared)
        if job is not None:
            job.shared = job.request._blocks[: len(job.text) // self.block]
            self.share(job.shared)
        self.prompt = job

    def prompt_of(self, request: Request, text: list[int]) -> Prefill | None:
        """Returns the last prompt if it is this text, with the same images and clips."""
        if self.prompt is None or self.prompt.text != text:
            return None
        inputs = self.prompt.request._inputs
        return self.prompt if inputs is request._inputs or not (inputs or request._inputs) else None

    def longest_prefix(
        self, text: list[int], running: Sequence[Request | None], *, rewinds: bool, num_ahead: int
    ) -> tuple[Request | None, int]:
        """Returns the row with the longest beginning of a text, and its length; 0 if none is useful.

        Args:
            text: The text.
            running: Rows that run.
            rewinds: Whether tokens can be removed from caches; if not, a cache is that of all its tokens.
            num_ahead: Number of tokens after each one that caches depend on.
        """
        best: Request | None = None
        longest = _SHORTEST_PREFIX - 1
        for row in self.cached:
            tokens = row.prompt + row.tokens[:-1]  # the last token has not been run
            if min(len(tokens), len(text)) <= longest or tokens[longest] != text[longest]:  # most often
                continue
            length = _common_length(tokens, text)
            if rewinds:
                length = min(length - num_ahead, len(text) - 1)  # the hidden state of the last one is needed
            elif row in running or length < len(tokens) or length == len(text):
                continue
            if length > longest:
                best, longest = row, length
        if best is None:
            return None, 0
        self.cached.remove(best)
        self.cached.append(best)
        return best, longest


def _common_length(a: list[int], b: list[int]) -> int:
    """Returns the number of tokens that two texts have in common at their beginning."""
    size = min(len(a), len(b))
    differs = np.asarray(a[:size]) != np.asarray(b[:size])
    return int(differs.argmax()) if differs.any() else size
