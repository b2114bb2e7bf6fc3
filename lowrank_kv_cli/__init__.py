"""The console command `lowrank-kv`, and the one name under which a wheel installs the packages `training` and `evaluation`.

Names as common as those must not land in a user's site-packages, so a wheel holds the two inside this package, as
`lowrank_kv_cli.training` and `lowrank_kv_cli.evaluation` (pyproject.toml maps the folders). In a checkout the folders lie
beside this one. The line below adds that place to this package's path, so the commands have one name for each module in
both, and a checkout needs no installation and no hook of an editable one.

Imports flow one way: the commands import the two packages, which never import this one. Inside, the two import one another's
modules relatively, so they do not depend on the name they were reached by.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
if not (_HERE / "training").is_dir():  # a checkout
    __path__.append(str(_HERE.parent))
