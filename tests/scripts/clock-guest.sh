# Commits the same number of times in each round, and then rests until the disk grows. During the rest the VMM should
# do no work for this guest.
for round in 1 2 3; do
    for number in $(seq 40); do
        dd if=/dev/zero of=/dev/vda bs=4096 count=1 seek=$number conv=fsync,notrunc 2>/dev/null || echo 'guest: dd failed'
    done
    echo "guest: commits $round"
done
while [ "$(cat /sys/block/vda/size)" = 65536 ]; do sleep 5; done
