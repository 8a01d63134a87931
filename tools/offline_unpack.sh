#!/bin/sh
# Unpack a bundle of tools/offline_bundle.py for a machine without a network. Usage: sh unpack.sh FOLDER
# Every part is checked before anything is written. Run it again after an interruption: what is there is kept.
set -eu

say() { printf 'unpack: %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
# sum_of FILE, bytes_of FILE: its SHA-256 in hexadecimal digits, its size.
sum_of() { sha256sum <"$1" | cut -d' ' -f1; }
bytes_of() { echo $(($(wc -c <"$1"))); }
# manifest_says KEY
manifest_says() { awk -F'"' -v key="$1" '$2 == key { print $4; exit }' "$here/manifest.json"; }

[ $# -eq 1 ] || die "usage: sh unpack.sh FOLDER (a new one, about as large as the parts)"
to=$1
here=$(cd "$(dirname "$0")" && pwd)
for tool in sha256sum tar awk head tail wc cut df; do
  command -v "$tool" >/dev/null || die "$tool is missing on this machine; install it."
done

check_parts() {
  wrong='' index=no
  [ -f "$here/SHA256SUMS" ] || die "$here/SHA256SUMS is missing: copy it again, or finish 'offline_bundle.py make'."
  while read -r sum name; do
    say "checking $name"
    if [ ! -f "$here/$name" ]; then
      wrong="$wrong $name is missing;"
    elif [ "$(sum_of "$here/$name")" != "$sum" ]; then
      wrong="$wrong $name is damaged;"
    fi
    [ "$name" != FILES ] || index=yes
  done <"$here/SHA256SUMS"
  [ -z "$wrong" ] || die "$here:$wrong copy again what is named here. Nothing was written."
  # It is the last one listed.
  [ "$index" = yes ] || die "$here/SHA256SUMS is cut short; copy it again. Nothing was written."
}

# stream OFFSET SIZE: that range of bytes of all parts, one after the other.
stream() {
  part=$(($1 / part_size)) skip=$(($1 % part_size)) left=$2
  while [ "$left" -gt 0 ]; do
    take=$((part_size - skip))
    [ "$take" -le "$left" ] || take=$left
    tail -c "+$((skip + 1))" "$here/bundle.$(printf %03d "$part")" | head -c "$take"
    part=$((part + 1)) skip=0 left=$((left - take))
  done
}

check_room() {
  needed=0 total=0
  while read -r sum size path; do
    total=$((total + size))
    [ -f "$to/$path" ] || needed=$((needed + size))
  done <"$here/FILES"
  free_kb=$(df -Pk "$to" | awk 'NR == 2 { print $4 }')
  [ "$free_kb" -gt $((needed / 1024)) ] ||
    die "$to has $((free_kb / 1024)) MB of free disk; unpacking needs $((needed / 1048576 + 1)) MB."
}

write_files() {
  offset=0
  while read -r sum size path; do
    if [ ! -f "$to/$path" ] || [ "$(sum_of "$to/$path")" != "$sum" ]; then
      say "$path ($((offset / 1000000)) of $((total / 1000000)) MB)"
      case $path in */*) mkdir -p "$to/${path%/*}" ;; esac
      stream "$offset" "$size" >"$to/.unfinished"
      [ "$(sum_of "$to/.unfinished")" = "$sum" ] ||
        die "$to/$path was not written as it should be: this disk or memory is faulty."
      mv "$to/.unfinished" "$to/$path"
    fi
    offset=$((offset + size))
  done <"$here/FILES"
}

check_parts
part_size=$(bytes_of "$here/bundle.000")
mkdir -p "$to"
to=$(cd "$to" && pwd)
if [ -f "$to/manifest.json" ]; then
  [ "$(sum_of "$to/manifest.json")" = "$(sum_of "$here/manifest.json")" ] ||
    die "$to holds another bundle; name a new folder."
fi
check_room
cp "$here/manifest.json" "$to/.unfinished"
mv "$to/.unfinished" "$to/manifest.json"
write_files
if [ ! -d "$to/megatron_fleet" ]; then
  rm -rf "$to/.project"
  mkdir "$to/.project"
  tar -xf "$to/project.tar" -C "$to/.project"
  mv "$to/.project/megatron_fleet" "$to/megatron_fleet"
  rmdir "$to/.project"
fi
# setup.sh reads it; it comes last.
while read -r sum size path; do printf '%s  %s\n' "$sum" "$path"; done <"$here/FILES" >"$to/.unfinished"
mv "$to/.unfinished" "$to/SHA256SUMS"

python=python$(manifest_says python)
command -v "$python" >/dev/null || say "$python is not in PATH: it is not in the bundle and must be installed on this machine"
option=
[ "$(manifest_says target)" != gpu ] || option=' --gpu'
say "done; now: cd '$to/megatron_fleet' && ./setup.sh$option --bundle '$to'"
