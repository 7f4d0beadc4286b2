import sys
sys.path.insert(0, "/work/wt/scale/tests")
from test_external_workers import *  # noqa
from test_external_workers import counted_run, ray_here, recipe
def test_control(recipe, tmp_path, ray_here):
    steps, notes = counted_run(recipe, tmp_path / "with", reads=True)
    for n in notes: print(n)
    assert 0
