#!/bin/sh
# Remake requirements.lock: one file for CPython 3.10-3.12 on Linux x86-64, with markers where versions differ.
set -eu
out=requirements.lock
uv pip compile --universal --python-version 3.10 --all-extras pyproject.toml --output-file "$out.new" \
  --no-header --no-annotate --no-emit-index-url --no-emit-find-links --quiet
{
  echo '# Every version that setup installs, for CPython 3.10-3.12 on Linux x86-64. Made by `make lock`; used as pip constraints.'
  sed -E "/implementation_name == 'pypy'/d; s/ ; python_full_version < '3.13' and platform_machine.*//; \
s/ and (python_full_version < '3.13' and )?platform_machine == 'x86_64' and sys_platform == 'linux'//" "$out.new"
} > "$out.tmp"
rm "$out.new"
mv "$out.tmp" "$out"
