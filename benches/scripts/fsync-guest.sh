# Commits on the disks $DISKS, below /dev, of a guest: each a write and an fsync. $TASK is `work` or `check`, $COMMITS
# the number of commits, and $CONSOLE where the host says when to go on. It counts what reaches the medium meanwhile.
# $BUSY: seconds of clients that never pause, or nothing.
step() {
    echo "guest: $1"
    read -r _ <"$CONSOLE"
}
# number NUMBER: as a line of 16 bytes. A place holds such lines, all the same.
number() { printf '%015d' "$1"; }
# put DISK PLACE BYTES NUMBER: commits a place.
put() {
    file=place-$(basename "$1")-$2
    yes "$(number "$4")" | head -c "$3" >"$file"
    dd if="$file" of="/dev/$1" bs="$3" count=1 seek="$2" oflag=direct conv=fsync,notrunc 2>/dev/null || echo "guest: $1 fails"
    rm "$file"
}
# get DISK PLACE BYTES: the different lines of a place.
get() { dd if="/dev/$1" bs="$3" count=1 skip="$2" iflag=direct 2>/dev/null | uniq; }
# blocks DISK FIRST COUNT NUMBER: commits blocks of 4 KiB, with this number and those after it.
blocks() {
    at=0
    while [ $at -lt "$3" ]; do
        put "$1" $(($2 + at)) 4096 $(($4 + at))
        at=$((at + 1))
    done
}
# pages FIRST COUNT: commits pages of 16 KiB with these numbers, behind the blocks, four by turns.
pages() {
    at=$1
    while [ $at -lt $(($1 + $2)) ]; do
        put "$first" $((64 + at % 4)) 16384 $at
        at=$((at + 1))
    done
}
# busy: four clients of each disk commit blocks behind the pages for $BUSY seconds. Prints how many.
busy() {
    set -- --name=global --rw=randwrite --bs=4k --offset=2M --size=1M --direct=1 --ioengine=psync --fsync=1 --numjobs=4 --thread \
        --group_reporting --time_based --runtime="$BUSY" --output-format=terse --terse-version=3
    for disk in $DISKS; do set -- "$@" --name="$disk" --filename="/dev/$disk"; done
    # The 47th figure is KiB written.
    fio "$@" | awk -F ';' '$1 == 3 { print $47 / 4 }'
}
for disk in $DISKS; do
    until [ -b "/dev/$disk" ]; do sleep 0.1; done
done
first=${DISKS%% *}
if [ "$TASK" = work ]; then
    blocks "$first" 0 1 1
    pages 0 4
    step ready
    blocks "$first" 0 "$COMMITS" 1000
    step alone
    for client in 0 1 2 3; do
        for disk in $DISKS; do blocks "$disk" $((client * 32)) $((COMMITS / 5)) 1500 & done
    done
    wait
    step together
    [ -z "$BUSY" ] || step "busy $(busy)"
    blocks "$first" 0 "$COMMITS" 2000
    step cut
    pages 4 28
    step torn
else
    at=0 lost=0 torn=0
    while [ $at -lt "$COMMITS" ]; do
        [ "$(get "$first" $at 4096)" = "$(number $((2000 + at)))" ] || lost=$((lost + 1))
        at=$((at + 1))
    done
    for at in 64 65 66 67; do
        [ "$(get "$first" $at 16384 | wc -l)" = 1 ] || torn=1
    done
    echo "guest: found $lost lost, $torn torn"
fi
