"""Shell script of a rented machine: installing, the recipe in its place, training."""

import shlex

from windlass.launch.description import MOUNT, Launch

# Of PyPI: one version, and of it only these wheels. A script that is piped into a shell may be
# another tomorrow.
UV = "uv==0.13.7"
UV_SHA256 = {
    "x86_64": "2c9bdc4a872b60a93c5f26c0791089ea11585a4f9d3b3c017d78eb8487505e25",
    "aarch64": "08f16fd463926786b702b497473511deae4b3e17a2fa6d22180950d6059a120d",
    "aarch64, older": "a90f5d95716ab83091f0f73a8e7ec64e557abf2a28537fcd719b2ac88e6f725a",
}
# TPU images come with Python 3.10, so uv brings its own. What is installed is left alone when this
# runs again: a training may be using it.
_INSTALL = """\
export PATH="$HOME/.local/bin:$PATH"
if [[ "$(cat "$HOME/windlass/installed" 2> /dev/null)" != {requirements} ]]; then
  command -v uv > /dev/null ||
    python3 -m pip --quiet install --user --require-hashes --requirement <(echo {uv})
  uv venv --quiet --allow-existing --python 3.12 "$HOME/windlass"
  uv pip install --quiet --python "$HOME/windlass/bin/python" {packages}
  echo {requirements} > "$HOME/windlass/installed"
fi"""

# Checkpoints are committed by renaming a folder, which gcsfuse refuses above a limit. Hosts look
# for files that others have just written, so nothing is to be remembered of what there was. Once
# it is mounted, not even root may look into it. A machine that has just begun may still be busy
# with updates of its own.
_BUCKET = """\
if ! mountpoint -q {mount}; then
  if ! command -v gcsfuse > /dev/null; then
    key=/usr/share/keyrings/cloud.google.asc
    packages=https://packages.cloud.google.com/apt
    curl -LsSf "$packages/doc/apt-key.gpg" | sudo tee "$key" > /dev/null
    echo "deb [signed-by=$key] $packages gcsfuse-$(lsb_release -cs) main" |
      sudo tee /etc/apt/sources.list.d/gcsfuse.list > /dev/null
    sudo apt-get -o DPkg::Lock::Timeout=300 update -qq
    sudo apt-get -o DPkg::Lock::Timeout=300 install -y -qq gcsfuse
  fi
  sudo mkdir -p {mount}
  sudo chown "$USER" {mount}
  gcsfuse --implicit-dirs --rename-dir-limit=200000 \\
    --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 {bucket} {mount}
fi"""


def install(launch: Launch) -> str:
    """Install Python and the package, in a folder of their own."""
    requirements = shlex.quote(" ".join(launch.packages))
    pinned = " ".join([UV, *(f"--hash=sha256:{digest}" for digest in UV_SHA256.values())])
    return _INSTALL.format(
        packages=shlex.join(launch.packages), requirements=requirements, uv=shlex.quote(pinned)
    )


def mount(launch: Launch) -> str:
    """Mount the bucket as a folder."""
    assert launch.bucket is not None
    return _BUCKET.format(mount=MOUNT, bucket=launch.bucket.name)


def heredoc(text: str) -> str:
    """Here-document: a text as the input of a command, to the letter."""
    end = "END"
    while end in text.splitlines():
        end += "_"
    return f"<< '{end}'\n{text.rstrip()}\n{end}"


def write_file(file: str, text: str) -> str:
    """Write a file in the folder of the launch; `file` is one word."""
    return f'mkdir -p "$HOME/launch"\ncat > "$HOME/launch/{file}" {heredoc(text)}'


def train(launch: Launch) -> str:
    """Train, in the folder of the launch."""
    return f'export PATH="$HOME/windlass/bin:$PATH"\ncd "$HOME/launch"\n{shlex.join(launch.train)}'
