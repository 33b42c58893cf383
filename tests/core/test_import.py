"""``import sparsebp`` is light and works with every optional package missing."""

import inspect
import subprocess
import sys
import types

import pytest

HEAVY = ("numba", "llvmlite", "cupy", "scipy", "torch", "jax", "typer", "click", "matplotlib", "rich", "mlxtend",
         "safetensors")  # fmt: skip
OPTIONAL = ("cupy", "torch", "jax", "typer", "click", "matplotlib", "rich", "mlxtend")
ROOMS = ("core.errors", "core.check", "core.backend", "kernels", "nn", "optim", "data", "runtime", "train", "cli")


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def said(code):
    """Return what a program prints that ends well."""
    result = run(code)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def heavy(imports, names=HEAVY):
    """Return which of these packages are there after some statements."""
    return said(f"""
import sys
{imports}
print(",".join(sorted({{name.split(".")[0] for name in sys.modules}} & set({names!r}))))
""")


@pytest.mark.parametrize("modules", [("sparsebp",), tuple(f"sparsebp.{room}" for room in ROOMS)])
def test_imports_nothing_heavy(modules):
    assert heavy(f"import {', '.join(modules)}") == ""


def test_import_of_the_package_alone_does_not_bring_numpy():
    assert heavy("import sparsebp", ["numpy"]) == ""


def test_ranks_need_no_deep_import():
    code = """
import sparsebp as sb
assert sb.run_ranks(2, lambda transport: transport.rank) == [0, 1]
assert callable(sb.connect)
"""
    assert heavy(code, (*HEAVY, "mpi4py")) == ""


def test_namespaces_list_their_public_names_alone():
    said("""
import types
import sparsebp
for name in sparsebp.__all__:
    namespace = getattr(sparsebp, name)
    if isinstance(namespace, types.ModuleType) and hasattr(namespace, "__all__"):
        assert dir(namespace) == sorted(namespace.__all__), name
""")


def test_every_public_name_can_be_had_without_the_optional_packages():
    said(f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
import sparsebp
for name in sparsebp.__all__:
    getattr(sparsebp, name)
assert dir(sparsebp) == sorted(sparsebp.__all__)
assert not sparsebp.core.backend.has_gpu()
""")


def test_every_public_class_function_and_method_is_documented():
    import sparsebp as sb

    found = {name: getattr(sb, name) for name in sb.__all__}
    for room, module in list(found.items()):
        names = getattr(module, "__all__", ()) if inspect.ismodule(module) else ()
        found |= {f"{room}.{name}": getattr(module, name) for name in names}
    for path, kind in [(path, kind) for path, kind in found.items() if inspect.isclass(kind)]:
        methods = [name for name, value in vars(kind).items() if callable(value) or isinstance(value, property)]
        found |= {f"{path}.{name}": getattr(kind, name) for name in methods if not name.startswith("_")}
    assert len(found) > 600 and "nn.Layer.jacobian_t" in found
    kinds = (type, property, types.FunctionType)  # no alias of types: it cannot have a docstring
    assert [path for path, value in found.items() if isinstance(value, kinds) and not inspect.getdoc(value)] == []


def test_unknown_names_raise_attribute_error():
    import sparsebp

    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        sparsebp.nothing_of_that_name  # noqa: B018


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_line_without_its_extra_is_one_message(missing):
    code = f"""
import sys
sys.modules[{missing!r}] = None
from sparsebp.cli.main import main
main(["info"])
"""
    result = run(code)
    assert result.returncode == 1
    assert missing in result.stderr
    assert "pip install 'sparsebp[cli]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_progress_bar_without_rich_names_the_extra(monkeypatch):
    from sparsebp.core.errors import MissingDependencyError
    from sparsebp.train import ProgressBar

    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingDependencyError, match=r"sparsebp\[cli\]"):
        ProgressBar()


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    from sparsebp.core.errors import MissingDependencyError
    from sparsebp.train import History, save_loss_curve

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"sparsebp\[plot\]"):
        save_loss_curve(History(), tmp_path / "x.png")
