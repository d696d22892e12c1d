"""`Storing`: a group's model to files and from files, and its tensors to the driver."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import partial

import ray

from raysharding.checkpoint.uri import normal_path
from raysharding.distributed.saving import Destination
from raysharding.group.administration import Administration
from raysharding.group.call import Call, Collect
from raysharding.group.handle import blocking, driver_handle, handle
from raysharding.group.locate import anchored
from raysharding.group.model_files import BegunSave
from raysharding.group.pending import Asking
from raysharding.group.results import FullStateDict, collect_rank0
from raysharding.group.state import GroupState


class Storing(Administration):
    """What `ShardedModelGroup` saves and loads with."""

    @handle
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        optimizer: bool = True,
        keep_last: int | None = None,
        async_save: bool = False,
    ) -> Call:
        """Save the model as a standard Hugging Face directory; each rank writes its own part.

        Args:
            path: Directory to make, on a file system that all ranks' nodes share; or a URI that `pyarrow.fs` takes
                (`s3://`, `gs://`, ...), to which each rank writes with the credentials of its environment; one save at
                a time.
            overwrite: Replace a save that is there. It stays whole until the new one is; in an object store, which has
                no rename, it is removed first. What no save wrote (a model card, `checkpoint-500/`) stays.
            optimizer: Also the optimizer's state, where one is set: in the folder `optimizer`, for `load` and for
                `from_checkpoint(..., optimizer=...)` at any world size; and beside it random generators and, of a
                `fit`, the position in the data. Default yes. While `fit` runs, a restart goes back to no save without.
            keep_last: Of the saves beside this one whose names differ in the last number alone (`step-100`), how many
                stay, this one with them; older ones are removed, but for what no save wrote. Default: all.
            async_save: Return as soon as each rank has copied its shards to host memory, and write in the background:
                the model may be trained on meanwhile. One save at a time: the next waits for it. What it fails of is
                raised by the next call of the group, once; what others have failed of by then is noted on it.
                `wait_for_save` and `shutdown` wait for it. Default no.

        Returns:
            A `SaveReport`; `None` for one in the background.

        Raises:
            ValueError: A bad `keep_last`.
            CheckpointError: The directory exists, is a mount point, holds what no save could carry over (lists it), or
                cannot be written.
        """
        target = normal_path(os.fspath(path))
        stall_s = self._channel.timeouts.load_stall_s
        Destination(target, overwrite, keep_last)  # refuses what is wrong
        collect = Collect(lambda _: None) if async_save else collect_rank0
        # A run that a restart took back to weights alone would go on from another step with them.
        save = self._files.begin_save(target, is_origin=optimizer or not self._fits.is_running)
        what = (target, overwrite, optimizer, keep_last, async_save, save.token)
        call = self._channel.submit_same("save", *what, deadline_s=stall_s, watch=True, collect=collect)
        if async_save:
            self._update_record()  # another driver may be the one to ask how it ended
            self._follow(save, call)
        else:
            call.when_done(partial(self._note_saved, weakref.ref(self), save))
        return call.keep_alive(self)

    @handle
    def load(self, path: str | os.PathLike[str]) -> Call:
        """Load another checkpoint of the same model into the group, in place.

        Args:
            path: A directory, file, index json or URI, as for `from_checkpoint`, that rank 0's node can read. A save
                of ours with an optimizer's state brings that back, too, where an optimizer is set.

        Returns:
            The `LoadReport` of the weights.

        Raises:
            CheckpointError: It cannot be found or trusted.
            PlanError: It does not fit: the group is READY, with the weights and the optimizer that it had.
            GroupError: A rank died, hung or raised after bytes had moved: what was there is overwritten in part.
        """
        target = anchored(os.fspath(path))
        stall_s = self._channel.timeouts.load_stall_s
        check = self._unless_fit("load")
        call = self._channel.submit_same("load", target, deadline_s=stall_s, watch=True, check=check)
        call.when_done(partial(self._note_loaded, weakref.ref(self), target, self._files.begin_load()))
        return call.keep_alive(self)

    @handle
    def state_dict(self, keys: str | Sequence[str] | None = None) -> Call:
        """Gather full tensors to the driver, a bucket at a time.

        Args:
            keys: FQNs to gather, or one FQN. Default: all.

        Returns:
            FQN → full CPU tensor, tied names included. The driver holds all of them; no rank does.

        Raises:
            GroupError: The model has no tensor of that name; the group stays READY.
        """
        kept = FullStateDict(self._channel.timeouts.call_s)
        wanted = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        collect = Collect(kept.collect)
        return self._channel.submit_same("state_dict", wanted, keep_step=kept.keep, collect=collect).keep_alive(self)

    @driver_handle
    @blocking
    def wait_for_save(self, stall_s: float | None = None) -> None:
        """Wait until the saves that `save(async_save=True)` has begun are committed; at once where there are none.

        Args:
            stall_s: Longest time without a byte written. Default: `Timeouts.load_stall_s`.

        Raises:
            CheckpointError: One failed: what was at its place is untouched.
            GroupError: One was lost with its ranks.
            TimeoutError: Nothing was written for so long; they go on.
        """
        self._channel.pending.wait(self._channel.timeouts.load_stall_s if stall_s is None else stall_s)

    @property
    def saves(self) -> tuple[str, ...]:
        """Paths of the saves that were committed, in that order, those in the background with them."""
        return tuple(self._files.saves)

    def _follow(self, save: BegunSave, call: Call) -> None:
        """Hear how a save in the background ends."""
        group = weakref.ref(self)
        actor, supervisor = self._channel.members[0].actor, self._supervisor

        def ask(number: int) -> ray.ObjectRef:
            return actor.save_status.remote(number)

        def why_lost() -> str:
            if not ray.is_initialized():  # what it is asked would start another one
                return "Ray was shut down under the group"
            if supervisor.state is GroupState.CLOSED:
                return "the group was shut down"
            cause = supervisor.standing.cause
            # Kept ranks may write on; one that is restarted in place says itself how it went.
            return "" if cause is None or supervisor.survivors.is_kept else str(cause).partition("\n")[0]

        def saved() -> None:
            left = group()
            if left is not None:
                left._files.committed(save)
                left._update_record()

        self._channel.pending.begin(save, call, Asking(ask, why_lost, saved))

    @staticmethod
    def _note_saved(group: weakref.ref[Storing], save: BegunSave, call: Call) -> None:
        """Remember the files of a save that went well."""
        owner = group()
        if owner is not None and call.succeeded():
            owner._files.committed(save)
            owner._update_record()

    @staticmethod
    def _note_loaded(group: weakref.ref[Storing], path: str, number: int, call: Call) -> None:
        """Remember the files of a load that went well."""
        owner = group()
        if owner is not None and call.succeeded():
            owner._files.loaded(path, number)
            owner._update_record()
