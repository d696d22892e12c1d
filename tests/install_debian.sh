#!/usr/bin/env bash
# Installs what the tests of cluster/ need besides Python: Slurm, an ssh server, a firewall, a container builder, Redis.
# Does nothing without root or apt-get (such tests then skip themselves), or where all of it is there.
set -euo pipefail
packages=(buildah debootstrap iproute2 munge nftables openssh-client openssh-server podman redis-server rsync slurm-wlm)
[ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || exit 0
installed=$(dpkg-query --show --showformat '${db:Status-Status}\n' "${packages[@]}" 2>/dev/null | grep -cx installed || true)
[ "$installed" -ne ${#packages[@]} ] || exit 0
# No service starts by itself: a test starts its own, and stops it.
policy=/usr/sbin/policy-rc.d
[ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy && trap 'rm -f $policy' EXIT; }
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
