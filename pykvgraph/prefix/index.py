"""The index of prefixes: which tokens have cells in the cache, from position 0 on, and who may use them."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pykvgraph.errors import CacheFullError, DeviceError, InvalidArgumentError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.hold import Hold
from pykvgraph.prefix import block
from pykvgraph.prefix.match import Found, Match
from pykvgraph.prefix.node import ALL, Node, Origin, Point, Root, below
from pykvgraph.prefix.node_saver import NodeSaver, save_leaf
from pykvgraph.prefix.timed_pins import TimedPins

Made = TypeVar("Made")


class PrefixIndex:
    """A tree of blocks: each node has 32 tokens and holds their cells (kv.hold).

    Texts that begin alike share nodes. A lookup compares tokens, so two texts never share by mistake.
    extend() adds what a sequence has; match() and attach() show it to another. Cells that nothing but the
    index keeps are given up by make_room(): leaves first, of them those used longest ago. A node is pinned
    while a running text begins with it, and for a time by pin_for(), n_pinned cells at most. salt: texts
    under different ones don't share.

    Models with windows or states go on only from resume points. add_point() keeps one, n_points at most, and
    n_spare besides that are spare ones. Spare points, which may never be of use, go first; then those that
    were used longest ago. saver: keeps elsewhere what others need the room of. frees, last: give up cells
    that are no part of it, before its own ones go and behind them; they return False when there are none.
    """

    def __init__(
        self,
        kv: KVCache,
        n_points: int = 0,
        saver: NodeSaver | None = None,
        frees: Callable[[], bool] = lambda: False,
        n_spare: int = 0,
        n_pinned: int = 0,
        last: Callable[[], bool] = lambda: False,
    ) -> None:
        """Texts are given as arrays of 32-bit ids, little-endian as wherever ggml runs."""
        self._kv = kv
        self._n_points = n_points
        self._n_spare = n_spare
        self._saver = saver
        self._frees, self._last = frees, last
        self._roots: dict[bytes, Root] = {}  # of salts that have texts
        self._clock = itertools.count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # a heap of what may go first; some entries are old
        self._points: OrderedDict[int, Point] = OrderedDict()  # by id; the first was used longest ago
        self._spare: OrderedDict[int, Point] = OrderedDict()
        self._timed = TimedPins(n_pinned)
        self.n_nodes = 0

    @property
    def n_points(self) -> int:
        """How many resume points it has."""
        return len(self._points) + len(self._spare)

    @property
    def n_pinned(self) -> int:
        """Cells that nobody evicts for a time."""
        return self._timed.n_cells

    @property
    def n_pinned_alone(self) -> int:
        """Of these, the cells that no running text begins with."""
        self._let_go()
        return self._timed.n_alone

    def match(self, ids: array[int], salt: bytes = b"") -> Match:
        """How much of these tokens is known; O(their number)."""
        node: Node = self._roots.get(salt) or Root(salt)
        path = [node]
        own = ids[: block.N_TOKENS].tobytes()
        while own and (child := node.children.get(own)):
            path.append(child)
            node = child
            own = ids[node.end : node.end + block.N_TOKENS].tobytes()
        nearest, run = node.nearest(own) if own else (None, 0)
        return Match(path, nearest, run, node.end + run)

    def best_point(self, ids: array[int], match: Match, limit: int) -> Point | None:
        """The highest point at or below position `limit` whose tokens these are, with cells up to it."""
        for depth in range(len(match.path) - 1, -1, -1):
            node = match.path[depth]
            n_cells = match.n - node.end
            behind = ids[node.end : node.end + block.N_TOKENS].tobytes()
            fits = [
                point
                for run, point in node.points.items()
                if point.p <= limit and point.p - node.end <= n_cells and behind.startswith(run)
            ]
            if fits:
                return max(fits, key=lambda point: point.p)
        return None

    def find(self, ids: array[int], limit: int, salt: bytes = b"") -> Found:
        """The most that a text can begin with of what the cache has, up to position `limit`."""
        match = self.match(ids, salt)
        if not self._n_points:
            return Found(match, min(match.n, limit), None)
        point = self.best_point(ids, match, limit)
        return Found(match, point.p if point else 0, point)

    def attach(self, found: Found, seq: int) -> Node:
        """Shows what was found to an empty sequence; returns the last whole node, pinned.

        All or nothing: after an error the sequence is empty again.
        """
        match, n, point = found
        root = last = match.path[0]
        assert isinstance(root, Root)
        self._roots.setdefault(root.salt, root)
        try:
            for node in [*match.path[1:], *([match.child] if match.child else [])]:
                if n <= node.end - node.n_tokens:
                    break
                assert node.hold is not None
                self._kv.attach(node.hold, seq, n)
                if n >= node.end and node is not match.child and node.n_tokens == block.N_TOKENS:
                    last = node
            if point is not None:
                self._kv.attach(point.resume, seq)
                self._kind(point).move_to_end(id(point))
        except BaseException:
            self._kv.seq_rm(seq, -1, -1)
            raise
        if match.child is not None and n > match.child.end - match.child.n_tokens:
            self._touch(match.child)
        self.pin(last)
        return last

    def begin(self, salt: bytes, n_exact: int = ALL, made_of: tuple[Origin, ...] = ()) -> Root:
        """Where a text under this salt begins that shares nothing yet, pinned. Others: as Root has them."""
        root = self._roots.setdefault(salt, Root(salt))
        root.learn(n_exact, made_of)
        self.pin(root)
        return root

    def pin(self, node: Node) -> None:
        """A running text begins with the tokens up to this node: they stay."""
        stamp = next(self._clock)
        for at in node.path():
            at.used = stamp
            at.n_pins += 1

    def unpin(self, node: Node) -> None:
        """The text that pin() spoke of has ended."""
        stamp = next(self._clock)
        for at in reversed(node.path()):
            at.used = stamp
            at.n_pins -= 1
            if at.n_pins == 0:
                at.is_doubled = False
                self._may_go(at)

    def pin_for(self, last: Node, ids: array[int], n: int, seconds: float) -> int:
        """Nobody evicts the whole blocks of a text's first n tokens for so long, as far as there is room.

        last: the text's last node. Returns how many tokens a text that begins alike finds until then: where
        the model needs a resume point, those before the last one, which stays as well; half of them do. 0:
        nothing of it stays.
        """
        self._let_go()
        root, *behind = [node for node in last.path() if node.end <= n]
        fitting = self._timed.fitting(behind)
        end = fitting[-1].end if fitting else 0
        if self._n_points:
            point = self.best_point(ids, Match([root, *fitting], None, 0, end), end)
            now = self._timed.now()
            n_others = sum(each.until > now for each in self._points.values() if each is not point)
            if point is None or n_others >= self._n_points // 2:
                return 0
            self._use(point, False)
            point.until = max(point.until, now + seconds)
            end = point.p
        self._timed.add(fitting, seconds)
        return end

    def give_up_pin(self) -> bool:
        """Others may have cells that were pinned for a time: those whose time would pass first, a block."""
        found = self._timed.give_up()
        for node in found:
            self._may_go(node)
        return bool(found)

    def hand_over(self, last: Node, heirs: Sequence[tuple[Node, int]]) -> None:
        """To be called before unpin(last) of a text that ends. heirs: last nodes and sequences of the others.

        Where running texts have the same tokens in different cells, the index holds the cells of one. When
        that one ends, it takes those of another: else the cells would stay for as long as the others run.
        """
        for at in reversed(last.path()):
            heir = next((seq for node, seq in heirs if node.begins_with(at)), None) if at.is_doubled else None
            if heir is not None:
                with contextlib.suppress(MemoryError):
                    self._hold_anew(at, heir)

    def extend(self, last: Node, ids: array[int], n: int, seq: int, *, to_end: bool = False) -> Node:
        """Adds what a sequence has behind the pinned node `last`; returns the new last one, pinned instead.

        ids: the whole text, whose first n tokens are in the sequence. to_end: adds what is left behind the
        whole blocks, too. Where memory ends, it adds less.
        """
        with contextlib.suppress(MemoryError):
            while last.end + block.N_TOKENS <= n:
                last = self._grow(last, ids[last.end : last.end + block.N_TOKENS].tobytes(), seq)
            if to_end and last.end < n:
                self._add_end(last, ids[last.end : n].tobytes(), seq)
        return last

    def keep(self, ids: array[int], n: int, seq: int, salt: bytes = b"", n_exact: int = ALL) -> None:
        """Keeps the first n tokens of a text, which a sequence has, for whoever comes back to it."""
        last: Node = self.begin(salt, n_exact)
        try:
            last = self.extend(last, ids, n, seq, to_end=True)
            if self._n_points:
                self.add_point(last, ids, n, seq)
        finally:
            self.unpin(last)

    def add_point(self, last: Node, ids: array[int], n: int, seq: int, *, is_spare: bool = False) -> bool:
        """Keeps a place to go on from behind the first n tokens of a sequence, from where it can go on.

        last: its last node, which ends behind position n - 32. is_spare: other spare points may go for it,
        and no others. Returns whether there was room for it, and the device has kept it.
        """
        at = last
        while n <= at.end and at.parent is not None:  # with the tokens before it, which need not be a block
            at = at.parent
        run = ids[at.end : n].tobytes()
        if run in at.points:
            self._use(at.points[run], is_spare)
            return True
        while self.n_points >= self._n_points + self._n_spare:
            if not self.drop_point(only_spare=is_spare):
                return False
        while not is_spare and len(self._points) >= self._n_points:
            if not self._give_up(self._points):
                return False
        while True:
            try:
                point = Point(at, run, self._kv.resume_point(seq, n), is_spare)
                break
            except CacheFullError:
                if not self.drop_point(only_spare=is_spare):
                    return False
            except (DeviceError, MemoryError):
                return False
        at.points[run] = point
        self._kind(point)[id(point)] = point
        return True

    def drop_point(self, *, only_spare: bool = False, takes_pinned: bool = False) -> bool:
        """Gives up the point that is least likely to be of use; False: there is none."""
        if self._give_up(self._spare):
            return True
        return not only_spare and (
            self._give_up(self._points) or (takes_pinned and self._give_up(self._points, True))
        )

    def with_points_room(self, call: Callable[[], Made], n_tokens: int, *, only_spare: bool = False) -> Made:
        """What call() returns, which needs cells for n_tokens: points go, as they keep cells of windows.

        Those that are pinned for a time go last. Raises CacheFullError when call() does and no point is left,
        or no spare one; and what call() raises.
        """
        while True:
            try:
                return call()
            except CacheFullError:
                if not self.drop_point(only_spare=only_spare, takes_pinned=True):
                    raise
            for _ in range(n_tokens // block.N_TOKENS):
                self.drop_point(only_spare=True)

    def forget(self, ids: array[int], salt: bytes = b"", begin: int = 0) -> int:
        """Gives up what it has behind `begin`, but what is pinned or others begin with: how many tokens."""
        self._let_go()
        match = self.match(ids, salt)
        ends_here = match.child is not None and match.run == match.child.n_tokens
        n = 0
        for node in reversed([*match.path[1:], *([match.child] if match.child and ends_here else [])]):
            if node.n_pins or node.children or node.until or node.end <= begin:
                break
            n += node.n_tokens
            self._remove(node)
        return n

    def forget_edited(self, ids: array[int], salt: bytes) -> None:
        """Gives up all of texts that are made of this one, and of these in turn, but what is pinned."""
        self._let_go()
        for root in [each for each in self._roots.values() if each.is_made_of(ids, salt)]:
            for node in reversed([*below(root)]):
                if not (node.n_pins or node.children or node.until):
                    self._remove(node)

    def make_room(self, n: int, *, takes_pinned: bool = False) -> bool:
        """Gives up nodes until n cells are empty; False: there are not enough.

        takes_pinned: in the end also those that are pinned for a time.
        """
        while self._kv.n_free < n:
            if not self.evict() and not (takes_pinned and self.give_up_pin()):
                return False
        return True

    def renewed(self) -> PrefixIndex:
        """An empty index of the same cache, in place of this one, whose holds all end.

        They end here, not when the garbage collector finds them; kv.clear() may have ended some. A change of
        this index may have been interrupted by Ctrl-C anywhere.
        """
        nodes = self._all_nodes()
        for node in nodes:
            if node.hold is not None:
                _end(node.hold)
        points = [*self._points.values(), *self._spare.values()]
        for point in (*points, *(each for node in nodes for each in node.points.values())):
            _end(point.resume)
        return PrefixIndex(
            self._kv,
            self._n_points,
            self._saver,
            self._frees,
            self._n_spare,
            self._timed.n_most,
            self._last,
        )

    def save(self) -> Iterator[None]:
        """Has the saver keep all that there is, a node at a time: what was used last comes first."""
        for node in sorted(self._all_nodes(), key=lambda node: -node.used):
            if self._saver is not None and node.hold is not None:
                self._saver.node(node)
                yield
        for point in [*self._points.values()][::-1]:
            self._save_point(point)
            yield

    def save_text(self, ids: array[int], salt: bytes, begin: int, saver: NodeSaver, n_prompt: int) -> None:
        """Gives a saver every node of a text that ends after position `begin`, with its resume points.

        Spare points are given from position n_prompt on only, which is where the answer begins.
        """
        match = self.match(ids, salt)
        for node in [*match.path[1:], *([match.child] if match.child else [])]:
            if node.end > begin and node.hold is not None:
                save_leaf(node, saver, spare_from=n_prompt)

    def clear(self) -> None:
        """Forgets everything that no running text needs, and that isn't pinned."""
        while self.evict():
            pass

    def evict(self) -> bool:
        """As evict_oldest(), and in the end what is no part of the index; False: there is nothing."""
        return self.evict_oldest() or self._last()

    def evict_oldest(self) -> bool:
        """Gives up the leaf that was used longest ago, or what `frees` does; False: there is none."""
        if self._frees():
            return True
        self._let_go()
        while self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            is_old = node.used != stamp or node.n_pins or node.children or node.hold is None
            if not is_old:
                if self._saver is not None:
                    save_leaf(node, self._saver)
                self._remove(node)
                return True
        return False

    def _all_nodes(self) -> list[Node]:
        """Each behind its parent."""
        return [*self._roots.values(), *(node for root in self._roots.values() for node in below(root))]

    def _save_point(self, point: Point) -> None:
        node, n = point.node.nearest(point.run)
        if self._saver is None or point.is_spare:
            return
        if node is not None and n * block.TOKEN_BYTES == len(point.run):
            self._saver.point(point, node)

    def _grow(self, last: Node, tokens: bytes, seq: int) -> Node:
        """The block behind `last`, pinned in its place."""
        child = last.children.get(tokens)
        if child is None:
            child = self._insert(last, tokens, self._kv.hold(seq, last.end, last.end + block.N_TOKENS))
        elif not child.n_pins:  # of two cells for the same token, those of the text that runs are kept
            self._hold_anew(child, seq)
        else:
            child.is_doubled = True
        child.used = last.used
        child.n_pins += 1
        return child

    def _hold_anew(self, node: Node, seq: int) -> None:
        """The cells of a sequence in place of those that the node has."""
        hold, node.hold = node.hold, self._kv.hold(seq, node.end - node.n_tokens, node.end)
        assert hold is not None
        _end(hold)

    def _add_end(self, last: Node, tokens: bytes, seq: int) -> None:
        n = len(tokens) // block.TOKEN_BYTES
        if last.nearest(tokens)[1] < n:  # no other node has all of it
            self._may_go(self._insert(last, tokens, self._kv.hold(seq, last.end, last.end + n)))

    def _insert(self, parent: Node, tokens: bytes, hold: Hold) -> Node:
        """A new node; the end of a text that it begins with goes, as the node has the same tokens."""
        child = Node(parent, tokens, hold)
        child.used = next(self._clock)
        shorter, run = parent.nearest(tokens)
        parent.add(child)
        self.n_nodes += 1
        if shorter is not None and run == shorter.n_tokens and not shorter.n_pins and not shorter.children:
            self._remove(shorter)
        return child

    def _remove(self, node: Node) -> None:
        assert node.hold is not None and node.parent is not None
        parent = node.parent
        _end(node.hold)
        node.hold = None
        parent.remove(node)
        self.n_nodes -= 1
        for point in list(node.points.values()):
            self._drop(point)
        for run, point in list(parent.points.items()):
            if parent.nearest(run)[1] * block.TOKEN_BYTES < len(run):
                self._drop(point)
        self._may_go(parent)

    def _give_up(self, points: OrderedDict[int, Point], takes_pinned: bool = False) -> bool:
        """The one that was used longest ago; False: there is none."""
        now = self._timed.now()
        point = next((each for each in points.values() if takes_pinned or each.until <= now), None)
        if point is None:
            return False
        self._save_point(point)
        del points[id(point)]
        self._forget(point)
        return True

    def _kind(self, point: Point) -> OrderedDict[int, Point]:
        return self._spare if point.is_spare else self._points

    def _use(self, point: Point, is_spare: bool) -> None:
        """It is wanted once more; for good, unless is_spare."""
        del self._kind(point)[id(point)]
        while point.is_spare and not is_spare and 0 < self._n_points <= len(self._points):
            if not self._give_up(self._points):
                break
        point.is_spare &= is_spare
        self._kind(point)[id(point)] = point

    def _drop(self, point: Point) -> None:
        del self._kind(point)[id(point)]
        self._forget(point)

    def _forget(self, point: Point) -> None:
        del point.node.points[point.run]
        _end(point.resume)

    def _touch(self, node: Node) -> None:
        node.used = next(self._clock)
        self._may_go(node)

    def _let_go(self) -> None:
        """Of what was pinned for a time that has passed."""
        for node in self._timed.expired():
            self._may_go(node)

    def _may_go(self, node: Node) -> None:
        if node.n_pins or node.children or node.until:
            return
        if isinstance(node, Root):
            self._roots.pop(node.salt, None)
            return
        heapq.heappush(self._leaves, (node.used, id(node), node))
        if len(self._leaves) > 4 * self.n_nodes + 64:  # most entries are old
            self._leaves = [entry for entry in self._leaves if entry[0] == entry[2].used and entry[2].hold]
            heapq.heapify(self._leaves)


def _end(hold: Hold) -> None:
    with contextlib.suppress(InvalidArgumentError):  # kv.clear() has ended it
        hold.release()
