"""Makes `import specdec` work when Python runs in the folder above a clone that is itself named `specdec`.

Python looks in the current folder first.  Without this file it would take the clone for an empty namespace package named
`specdec`, ahead of an editable install, and `specdec.SpecDecoder` would not exist.  With this file Python imports the package
of the same name that lies inside the clone.  The clone then also comes before an installed wheel of specdec, as any package in
the current folder does.  No other code imports this file, and the wheel does not hold it.
"""

import importlib.util
import sys
from pathlib import Path

if __name__ == "specdec":
    _clone = Path(__file__).resolve().parent
    _package = _clone / "specdec"
    _spec = importlib.util.spec_from_file_location(
        __name__,
        _package / "__init__.py",
        submodule_search_locations=[str(_package), str(_clone)],  # attention/, draft/ and verify/ lie beside specdec/
    )
    assert _spec is not None and _spec.loader is not None
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
