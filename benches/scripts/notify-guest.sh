# The script of the guest of notify-machine.sh. Its first part is load.sh.
SIZE=16M
ask() {
    echo 'measure: ask'
    read -r _ </dev/ttyS0
}
stty -echo </dev/ttyS0
device_of() { grep -l -x "$1" /sys/block/vd*/serial | cut -d/ -f4; }
tcmu=''
if [ -d /program ]; then
    # The program uses the libraries that it was built with, which may be newer than the guest's.
    printf '#!/bin/sh\nexec /program/loader --library-path /program /program/walvisor "$@"\n' >/bin/walvisor
    chmod +x /bin/walvisor
    mount -t configfs configfs /sys/kernel/config
    serve tcmu tcmu --disk path=/dev/"$(device_of pci-on-ram)",backend=raw,name=ram,serial=ram \
        --disk path=/dev/"$(device_of pci-on-wal)",backend=raw,name=wal,serial=wal && tcmu=1
else
    missing tcmu-in-guest 'the guest has no walvisor'
fi
virtio_paths() {
    for name in mmio-on pci-on mmio-off pci-off; do
        measure $name "$(device_of $name-"$backend")" $name-"$backend" monitor ''
    done
    [ -z "$tcmu" ] || measure tcmu-in-guest "$(scsi_disk tcmu "$backend")" pci-on-"$backend" monitor tcmu
}
for round in $(seq "$ROUNDS"); do
    each_job virtio_paths
    echo 'measure: turn'
    read -r _ </dev/ttyS0
done
[ -z "$tcmu" ] || { kill -TERM "$(cat tcmu.pid)"; wait "$(cat tcmu.pid)"; }
