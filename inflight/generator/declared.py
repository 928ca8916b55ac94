"""What vLLM's sources declare, compared with what inflight depends on: signatures of functions, attributes of classes.

Sources are parsed, not imported: the comparison runs without a GPU and on an unpacked wheel.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """The sources of one package `vllm`. Each file is parsed once: some take half a second."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bodies: dict[str, list[ast.stmt]] = {}

    def function(self, file: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The definition of `Class.method` or `function` in a file; None when there is none."""
        node = self._defined(file, name)
        return node if not isinstance(node, ast.ClassDef) else None

    def class_of(self, file: str, name: str) -> ast.ClassDef | None:
        """The definition of a class in a file; None when there is none."""
        node = self._defined(file, name)
        return node if isinstance(node, ast.ClassDef) else None

    def _defined(self, file: str, name: str) -> Node | None:
        if file not in self._bodies:
            path = self._root / file
            self._bodies[file] = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
        body = self._bodies[file]
        node: Node | None = None
        for part in name.split("."):
            node = next((each for each in body if isinstance(each, Node) and each.name == part), None)
            if node is None:
                return None
            body = node.body
        return node


@dataclass(frozen=True)
class Hook:
    """One function of vLLM."""

    name: str
    """`Class.method` or `function`."""
    files: tuple[str, ...]
    """Files that define it in supported versions, relative to the package `vllm`; every definition found must match."""
    signatures: tuple[str, ...]
    """Accepted parameter lists without annotations, as `ast.unparse` writes them."""

    def changes(self, sources: Sources) -> list[str]:
        """Differences from vLLM's sources, one line each."""
        known = " or ".join(f"({signature})" for signature in self.signatures)
        found = {file: node for file in self.files if (node := sources.function(file, self.name)) is not None}
        if not found:
            return [f"{self.name}{known} is in none of {', '.join(self.files)}"]
        return [
            f"{file} has {self.name}({_signature(node)}), known is {known}"
            for file, node in found.items()
            if _signature(node) not in self.signatures
        ]


@dataclass(frozen=True)
class Attributes:
    """What inflight reads or sets of a class's instances, or of the class itself."""

    name: str
    """The class."""
    files: tuple[str, ...]
    """As a Hook's; each of the files has such a class of its own."""
    attributes: tuple[str, ...]

    def changes(self, sources: Sources) -> list[str]:
        """As a Hook's: one line for each class that neither declares an attribute nor assigns it in a method."""
        found = {file: node for file in self.files if (node := sources.class_of(file, self.name)) is not None}
        if not found:
            return [f"class {self.name} is in none of {', '.join(self.files)}"]
        missing = {file: sorted(set(self.attributes) - set(_assigned(node))) for file, node in found.items()}
        return [f"{file}: {self.name} has no {', '.join(names)}" for file, names in missing.items() if names]


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Parameters and defaults; annotations are ignored, because their changes between versions have no effect."""
    arguments = node.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    return ast.unparse(arguments)


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    """Names that the class declares, and those that its methods assign to `self`."""
    for each in node.body:
        match each:
            case ast.FunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield name
    for each in ast.walk(node):
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                    yield one.attr
