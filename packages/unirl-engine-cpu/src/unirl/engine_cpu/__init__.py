"""Source trees of packages that make engines run on a CPU. Nothing here is imported: engines name the folders as
additions to their environments, and `unirl engine-env` installs them there."""
