"""Which words a chat template looks for in the texts that it is given."""

from collections.abc import Iterator

from jinja2 import nodes


def looked_for(template: nodes.Template) -> set[str]:
    """The constants that a template compares with, or gives to methods and filters: ``'</think>' in content``,
    ``content.split('</think>')``.
    """
    return {
        node.value
        for place in _places(template)
        for node in (place, *place.find_all(nodes.Const))
        if isinstance(node, nodes.Const) and isinstance(node.value, str)
    }


def _places(template: nodes.Template) -> Iterator[nodes.Node]:
    yield from template.find_all(nodes.Compare)
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):  # of a value; calls of macros write what they are given
            yield from call.args
    for filtered in template.find_all(nodes.Filter):
        yield from filtered.args
