"""The view service: who is primary and backup of each shard, under which term. Events in, actions out.

A primary that is gone is replaced by its backup if it was reported in sync in that very term. If there is none, what
the shard had since the last checkpoint is lost; then *all* shards go back to it, under a new epoch of the ledger.
A server is gone when it has died, or has been silent for so long that its lease must have run out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from manyhands.core.messages import Beat, Grant, Send, Timing, View, Views

__all__ = ["ViewService"]


@dataclass(slots=True, kw_only=True)
class ViewService:
    """The views of all shards. ``epoch`` grows when they have gone back to ``checkpoint``."""

    shards: int
    timing: Timing
    checkpoint: int = 0
    """The last complete one: where a new epoch begins."""
    epoch: int = 0
    views: list[View] = field(init=False)
    in_sync: set[int] = field(default_factory=set)
    """The shards whose backup may be promoted."""
    until: dict[int, float] = field(default_factory=dict)
    """The living servers, and when they count as gone."""
    dead: set[int] = field(default_factory=set)
    shunned: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By shard: a server that its primary could not reach, and until when it is not tried again."""
    _ticked: float = 0.0
    _announced: Views | None = None

    def __post_init__(self) -> None:
        self.views = [View(shard, 0, 0, None, None, self.checkpoint) for shard in range(self.shards)]

    def start(self, servers: list[int], now: float) -> list[Send]:
        """The first epoch, on these servers."""
        self._ticked = now
        for server in servers:
            self.until[server] = now + self.timing.wait_s
        self._go_back()
        self._fill(now)
        return self._announce()

    def current(self) -> Views:
        """All views, as they are now."""
        return Views(self.epoch, tuple(self.views))

    def beat(self, server: int, message: Beat, now: float) -> list[Send]:
        """A server is alive; one that is not known, or was believed to be gone, joins."""
        if server in self.dead:
            return []
        self.until[server] = now + self.timing.wait_s
        for report in message.reports:
            view = self.views[report.shard]
            if view.term != report.term or view.primary != server:
                continue
            if report.backup == "in sync":
                self.in_sync.add(view.shard)
            elif report.backup == "stuck" and view.backup is not None:
                self.shunned[view.shard] = (view.backup, now + self.timing.transfer_s)
                self._change(view, view.primary, None)
        self._fill(now)
        return [*self._announce(), Send(server, Grant(message.sent, self.current()))]

    def died(self, server: int, now: float) -> list[Send]:
        """A server has ended: it can say nothing any more."""
        self.dead.add(server)
        self._replace([server])
        self._fill(now)
        return self._announce()

    def tick(self, now: float) -> list[Send]:
        """To be called every ``beat_s``."""
        if now - self._ticked > self.timing.lease_s / 2:
            # It was this process that was silent. Beats wait to be read.
            self.until = {server: max(until, now + self.timing.wait_s) for server, until in self.until.items()}
        self._ticked = now
        self._replace([server for server, until in self.until.items() if until <= now])
        self._fill(now)
        return self._announce()

    def _replace(self, gone: list[int]) -> None:
        for server in gone:
            self.until.pop(server, None)
        lost = False
        for view in list(self.views):
            if view.primary in gone:
                if self._may_promote(view):
                    self._change(view, view.backup, None)
                else:
                    lost = True
            elif view.backup in gone:
                self._change(view, view.primary, None)
        if lost:
            self._go_back()

    def _may_promote(self, view: View) -> bool:
        return view.shard in self.in_sync and view.backup in self.until

    def _go_back(self) -> None:
        self.epoch += 1
        for view in list(self.views):
            primary = view.primary if view.primary in self.until else self._spare()
            backup = view.backup if view.backup in self.until and view.backup != primary else None
            self._change(view, primary, backup)

    def _fill(self, now: float) -> None:
        """Restore what is missing where a server is to be had."""
        for view in list(self.views):
            shunned, until = self.shunned.get(view.shard, (None, now))
            primary = view.primary if view.primary is not None else self._spare()
            backup = view.backup
            if backup is None:
                backup = self._spare(primary, shunned) if now < until else self._spare(primary)
            if (primary, backup) != (view.primary, view.backup):
                self._change(view, primary, backup)

    def _change(self, view: View, primary: int | None, backup: int | None) -> None:
        self.in_sync.discard(view.shard)
        self.views[view.shard] = replace(
            view,
            epoch=self.epoch,
            term=view.term + 1,
            primary=primary,
            backup=backup,
            checkpoint=self.checkpoint if view.epoch != self.epoch else view.checkpoint,
        )

    def _spare(self, primary: int | None = None, shunned: int | None = None) -> int | None:
        """The living server with the least to do; as a backup, among equals, the next one after the primary."""
        work = {server: 0 for server in self.until if server not in (primary, shunned)}
        for view in self.views:
            for server in (view.primary, view.backup):
                if server in work:
                    work[server] += 1
        return min(work, key=lambda server: (work[server], server <= (primary or 0), server), default=None)

    def _announce(self) -> list[Send]:
        """Tell the servers, if anything has changed."""
        views = self.current()
        if views == self._announced:
            return []
        self._announced = views
        return [Send(server, views) for server in self.until]
