"""Source trees of packages that make engines run on a CPU. UniRL imports none of them: engines list the folders as
additions to their environments, and `unirl engine-env` installs them there."""
