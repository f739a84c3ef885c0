"""A certificate of a script, as `toolkit certify` makes it."""

import io
import json

import pytest
from places import SCRIPTS
from rich.console import Console

from toolkit.certifying.certify import certify
from toolkit.certifying.options import CertifyOptions


@pytest.fixture
def certificate_of(as_launched, tmp_path_factory):
    """Return the checks of a script, by their names, with its exit code, folder and words."""

    def made(*script, strategy="ddp", **options):
        folder = tmp_path_factory.mktemp("certificate")
        said = io.StringIO()
        first = script[0] if script[0] == "-m" else str(SCRIPTS / script[0])
        code = certify(
            [first, *map(str, script[1:])],
            CertifyOptions(strategy=strategy, output=folder, **options),
            console=Console(file=said, width=200),
        )
        page = json.loads((folder / "certificate.json").read_text("utf-8"))
        assert code == (page["answer"] == "broken")
        return {check["check"]: check for check in page["checks"]}, folder, said.getvalue()

    return made
