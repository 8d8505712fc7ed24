# The paths of user-mode Linux, which are near native: vhost-user disks, TCMU and the NBD client of its kernel, and
# TCMU inside it over the vhost-user disks. The script's first part is load.sh.
SIZE=64M ALWAYS_ASK=1
ask() {
    echo 'measure: ask'
    read -r _ </dev/tty0
}
prepare_user_mode
start_local
inner=''
serve inner tcmu --control inner.ctl --disk path=/dev/vda,backend=raw,name=inner-ram,serial=inner-ram \
    --disk path=/dev/vdb,backend=raw,name=inner-wal,serial=inner-wal && inner=1
virtio_disk() { case $1 in ram) echo vda ;; wal) echo vdb ;; esac; }
all_paths() {
    measure vhost-user "$(virtio_disk "$backend")" "$backend" monitor ''
    [ -z "$inner" ] || measure tcmu-in-guest "$(scsi_disk inner "inner-$backend")" "$backend" monitor inner
    local_paths
}
for round in $(seq "$ROUNDS"); do each_job all_paths; done
stop tcmu inner nbd
