"""Generator of files that are derived from the services' settings: ``python -m charts.settings`` (``make settings``).

The structs in the services' ``config`` are the source of the settings page, of the chart's values schema and of the
table in the chart's README.
"""

import json
import sys
from pathlib import Path

from charts import config_schema, settings_page, value_needs, values_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/settings.md"


def generated() -> dict[Path, str]:
    """Return the wanted content of each generated file."""
    schema = json.loads(values_table.SCHEMA.read_text(encoding="utf-8"))
    schema = config_schema.with_pools(config_schema.with_config(schema))
    readme = values_table.README.read_text(encoding="utf-8")
    return {
        PAGE: settings_page.page(),
        values_table.SCHEMA: json.dumps(schema, indent=2) + "\n",
        value_needs.FILE: value_needs.text(),
        values_table.README: values_table.with_table(readme, schema),
    }


def stale() -> list[Path]:
    """Return the generated files whose content is out of date."""
    return [path for path, text in generated().items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main() -> None:
    """Write the files that are out of date."""
    texts = generated()
    for path in stale():
        path.write_text(texts[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
