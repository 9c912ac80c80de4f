"""Compiling and running a chat template. Imports jinja2, so it is imported where a template is rendered.

jinja2 parses the template; its tree is rewritten before jinja2 compiles it. Text and string constants become `Marked`
(see `template_text`), and every operation whose cost or result depends on its operands becomes a call of the sandbox
(see `template_sandbox`). A kind of node that is not listed here is refused: nothing runs that nobody has bounded.
"""

from collections.abc import Mapping
from types import CodeType
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

from reflex_ipc.errors import TemplateError
from reflex_ipc.template_sandbox import Refusal, Sandbox
from reflex_ipc.template_text import Budget

MAX_SOURCE = 1 << 16
"""Characters of the longest template that is compiled; real ones have up to 20,000."""

_FILENAME = "<chat template>"
_STATEMENTS = {
    *("Assign", "AssignBlock", "Block", "Break", "CallBlock", "Continue", "ExprStmt", "FilterBlock", "For", "If"),
    *("Macro", "Output", "Scope", "Template", "With"),
}
_EXPRESSIONS = {
    *("Add", "And", "Call", "Compare", "Concat", "CondExpr", "Const", "Dict", "Div", "Filter", "FloorDiv", "Getattr"),
    *("Getitem", "Keyword", "List", "Mod", "Mul", "NSRef", "Name", "Neg", "Not", "Operand", "Or", "Pair", "Pos", "Pow"),
    *("Slice", "Sub", "TemplateData", "Test", "Tuple"),
}
_NODES = _STATEMENTS | _EXPRESSIONS


def compile_template(source: str) -> CodeType:
    """The template's code, to be run by `render`. Raises TemplateError with the line for what cannot be compiled."""
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"it is {len(source)} characters long; up to {MAX_SOURCE} are compiled")
    sandbox = Sandbox(Budget())
    try:
        tree = _Rewriter(sandbox.budget).visit(sandbox.parse(source))
        return sandbox.compile(tree, filename=_FILENAME)
    except TemplateSyntaxError as error:
        raise TemplateError(f"line {error.lineno}: {_brief(error.message)}") from None
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise TemplateError(f"it is nested too deeply, or no template: {_brief(error)}") from None


def render(code: CodeType, variables: Mapping[str, Any], budget: Budget) -> str:
    """Run the code with these variables. What the template wrote of the result is marked. Raises TemplateError."""
    sandbox = Sandbox(budget)
    template = Template.from_code(sandbox, code, sandbox.globals)
    try:
        return sandbox.concat(template.root_render_func(template.new_context(dict(variables))))
    except Refusal as error:
        raise TemplateError(f"it refuses these messages: {_brief(error)}") from None
    except RecursionError as error:
        raise TemplateError(f"{_line(error, template)}macros or data are nested too deeply") from None
    except MemoryError as error:
        raise TemplateError(f"{_line(error, template)}memory ran out") from None
    except TemplateError as error:
        raise TemplateError(f"{_line(error, template)}{_brief(error)}") from None
    except Exception as error:
        raise TemplateError(f"{_line(error, template)}{type(error).__name__}: {_brief(error)}") from None


def _brief(error: object) -> str:
    message = str(error)
    return message if len(message) <= 500 else message[:500] + " ..."


def _line(error: BaseException, template: Template) -> str:
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILENAME:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return f"line {line}: " if line else ""


def _call(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    """A call of the sandbox. As filters they take jinja2's own way into the code; no template can spell their names."""
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class _Rewriter(NodeTransformer):
    """Turns constants into marked text and operations into calls of the sandbox."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.budget.spend()
        kind = type(node).__name__
        if kind not in _NODES:
            raise TemplateSyntaxError(f"a chat template cannot use {kind}", node.lineno)
        return super().visit(node, *args, **kwargs)

    def visit_Const(self, node: nodes.Const) -> nodes.Expr:
        return _call("#text", node) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Expr:
        return _call("#text", nodes.Const(node.data, lineno=node.lineno))

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            child if isinstance(child, nodes.Filter) and child.name == "#text" else _call("#out", child)
            for child in node.nodes
        ]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = _call("#tick", nodes.Const(None, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("#~", *node.nodes)

    def _binary(self, node: nodes.BinExpr) -> nodes.Node:
        self.generic_visit(node)
        return _call(f"#{node.operator}", node.left, node.right)

    visit_Add = visit_Sub = visit_Mul = visit_Div = visit_FloorDiv = visit_Mod = visit_Pow = _binary

    def _operand(self, node: nodes.Expr) -> nodes.Expr:
        """An operand of a comparison, or a key: constants stay what they are, nobody will see them."""
        return node if isinstance(node, nodes.Const) else _call("#operand", self.visit(node))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        node.expr = self._operand(node.expr)
        for other in node.ops:
            other.expr = self._operand(other.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = self._operand(node.arg)
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("#slice", node.node, *(nodes.Const(None) if end is None else self.visit(end) for end in ends))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("#box", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("#box", node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        for pair in node.items:
            pair.key = self.visit(pair.key) if isinstance(pair.key, nodes.Const) else self._operand(pair.key)
            pair.value = self.visit(pair.value)
        return _call("#box", node)
