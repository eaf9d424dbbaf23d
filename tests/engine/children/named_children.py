"""Children that a test looks at and ends by the names that they have now."""

from sipipe.engine.children.children import Child, Children


class NamedChildren(Children):
    """Children, the last one of each name in :attr:`by_name`, dead or alive."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, Child] = {}

    def start(self, name, *arguments, **options):
        child = super().start(name, *arguments, **options)
        self.by_name[name] = child
        return child

    def rename(self, child, name):
        self.by_name.pop(child.name, None)
        super().rename(child, name)
        self.by_name[name] = child
