"""Trees of samples: the samples of a group share their noise up to the steps at which they branch."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.core.types.batch import rows_by_group

__all__ = ["branch_noise_ids"]


def branch_noise_ids(
    sample_ids: Sequence[str], group_ids: Sequence[str], *, branch_steps: Sequence[int], factor: int, num_steps: int
) -> tuple[tuple[str, ...], ...]:
    """The key of each sample's noise at each of `num_steps` steps.  Returns N tuples of T ids.

    The samples of a group are, in their order, the leaves of a tree in which every path has `factor` children at each
    of the K branch steps. A path's key is the id of its first leaf: the samples below it draw the same noise, the paths
    of one step draw independent noise, and a sample that shares its path with no other has its own id, as without a
    tree.

    branch_steps: rising.  Raises ValueError unless every group has factor ** K samples.
    """
    expected = factor ** len(branch_steps)
    keys: list[tuple[str, ...]] = [()] * len(sample_ids)
    for group, rows in rows_by_group(group_ids).items():
        if len(rows) != expected:
            raise ValueError(
                f"branch_steps: got {len(rows)} samples in group {group!r}, expected {expected}: branch_factor "
                f"{factor} at the {len(branch_steps)} steps {list(branch_steps)}. Set data.samples_per_prompt to "
                f"{expected}."
            )
        for leaf, row in enumerate(rows):
            own: list[str] = []
            for step in range(num_steps):
                # Leaves of one path at this step.
                size = int(factor ** sum(step < branch for branch in branch_steps))
                own.append(sample_ids[rows[leaf - leaf % size]])
            keys[row] = tuple(own)
    return tuple(keys)
