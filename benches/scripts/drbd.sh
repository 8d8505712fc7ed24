# A machine of a pair with DRBD between them, in user-mode Linux over the files of its host. /dev/ubda is its half of the
# replicated disk; /dev/ubdb, of the first machine, is a disk without DRBD. Before this script come NODE (1 or 2), PROTOCOL
# (A, B or C) and BENCH (the program that measures). The script takes commands from the console, one per line: the
# functions below. After each it prints `guest: done STATUS`. It runs in an empty directory in memory.
exec 2>&1
echo node$NODE >/proc/sys/kernel/hostname
peer=10.0.0.$((3 - NODE))
mkdir -p /run/lock disk
cat >drbd.conf <<END
global { usage-count no; }
resource r0 {
    net { protocol $PROTOCOL; ping-timeout 50; }
    on node1 { device /dev/drbd0; disk /dev/ubda; meta-disk internal; address 10.0.0.1:7788; }
    on node2 { device /dev/drbd0; disk /dev/ubda; meta-disk internal; address 10.0.0.2:7788; }
}
END
drbd() { drbdadm -c "$PWD/drbd.conf" "$@" </dev/null; }

# Connects to the other machine. Both disks are empty, so no first synchronisation is needed.
up() {
    ip link set lo up && ip link set vec0 up && ip addr add 10.0.0.$NODE/24 dev vec0 &&
        drbd create-md --force r0 && drbd up r0 && drbd wait-connect r0
}

# Makes this machine the primary of a new replicated disk.
promote_new() { drbd -- --clear-bitmap new-current-uuid r0 && drbd primary r0; }

# Makes this machine the primary after the other has died.
take_over() { drbd disconnect --force r0; drbd primary r0 && mount /dev/drbd0 disk; }

# Makes a file system on a device, and mounts it. All of it is written now, and nothing later in the background.
format() { mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 "$1" </dev/null && mount "$1" "$2"; }

# Delays every frame that this machine sends by so many milliseconds.
delay() { tc qdisc replace dev vec0 root netem delay "$1ms" limit 100000; }

# Whether DRBD has this state, and the disk of this machine is up to date.
state() { grep -q " cs:$1 ro:[^ ]* ds:UpToDate/" /proc/drbd || { cat /proc/drbd; false; }; }

# Prints the shortest and the mean round trip in milliseconds.
round_trip() { ping -q -c 20 -i 0.02 $peer | sed -n 's|^rtt .* = \([^/]*\)/\([^/]*\)/.*|guest: rtt \1 \2|p'; }

# Prints the report of `walvisor-bench store commit` in a directory.
commit() {
    place=$1
    shift
    "$BENCH" store commit --no-baseline --rounds 1 --json --dir "$place" "$@" >report 2>errors </dev/null || { cat errors; return 1; }
    echo "guest: report $(cat report)"
}

# Clients that print each commit that was acknowledged, until this machine dies.
load() { "$BENCH" store acknowledge --dir disk --clients "$1" </dev/null & }

# Prints which commits of the clients are there.
found() { "$BENCH" store survivors --dir disk --clients "$1" </dev/null; }

echo guest: ready
while read -r line; do
    eval "$line"
    echo "guest: done $?"
done
