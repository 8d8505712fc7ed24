# Atomic writes to a disk of `walvisor serve tcmu`, by the kernel's own SCSI disk driver (loopback). Runs on the Debian
# machine itself, with no guest. $JOB/atomic is the program of atomic.c.
mount -t configfs configfs /sys/kernel/config
walvisor disk create a.img --size 32M || exit
walvisor serve tcmu --disk path=a.img,fabric=loop >served 2>log &
daemon=$!
until [ -s served ]; do
    kill -0 $daemon 2>/dev/null || { cat log; exit 1; }
    sleep 0.2
done
device=$(sed -n 's|^serving .* at \(/dev/[a-z]*\).*|\1|p' served)
chmod +x "$JOB/atomic"
"$JOB/atomic" "$device"
kill -TERM $daemon
wait $daemon
echo "job: daemon: status $?"
walvisor disk check a.img >/dev/null
echo "job: check: status $?"
