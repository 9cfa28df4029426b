"""Discovery of the public classes of a package."""

from __future__ import annotations

import importlib
import pkgutil


def public_classes(package: str, base: type) -> dict[str, type]:
    """Returns the subclasses of `base` that a package's modules define, by name.

    A class is public unless its name, or that of its module, begins with an underscore.
    The package is imported; its subpackages are not searched.

    Raises:
        ValueError: If two modules define a class of the same name.
    """
    found: dict[str, type] = {}
    path = importlib.import_module(package).__path__
    for module_name in sorted(module.name for module in pkgutil.iter_modules(path)):
        if module_name.startswith("_"):
            continue
        module = importlib.import_module(f"{package}.{module_name}")
        for name, value in vars(module).items():
            # `list[int]` passes for an instance of `type` on Python 3.10.
            is_class = issubclass(type(value), type) and issubclass(value, base)
            is_defined_here = is_class and value.__module__ == module.__name__
            if not is_defined_here or name.startswith("_"):
                continue
            if name in found:
                raise ValueError(
                    f"Two modules of {package} define a class {name}: "
                    f"{found[name].__module__} and {value.__module__}"
                )
            found[name] = value
    return dict(sorted(found.items()))
