"""Writes where the project lives into what PyPI shows: project URLs, and README's links and pictures, relative here.

`python .github/home.py URL`, before a build; the publishing workflow knows the URL of its own repository.
"""

import pathlib
import re
import sys


def main(url: str) -> None:
    root = pathlib.Path(__file__).resolve().parents[1]
    project, readme = root / "pyproject.toml", root / "README.md"
    files = f"{url}/blob/main/"
    urls = f'[project.urls]\nSource = "{url}"\nIssues = "{url}/issues"\nChangelog = "{files}CHANGELOG.md"\n\n'
    text = project.read_text(encoding="utf-8")
    heading = "[project.optional-dependencies]\n"
    if text.count(heading) != 1 or "[project.urls]" in text:
        sys.exit(f"{project}: expected one {heading.strip()} and no [project.urls]")
    project.write_text(text.replace(heading, urls + heading), encoding="utf-8")
    text = readme.read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\1{url}/raw/main/", text)  # the page of a picture is no picture
    readme.write_text(re.sub(r"\]\((?!\w+:|#)", f"]({files}", text), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
