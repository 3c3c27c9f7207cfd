"""Declaration of the packages. The folder `pipelines/`, at the top of the repository, is installed
as `sfumato/pipelines/`.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["sfumato*", "stages*"]),
        "sfumato.pipelines",
        "sfumato.pipelines.profiles",
    ],
    package_dir={"sfumato.pipelines": "pipelines"},
)
