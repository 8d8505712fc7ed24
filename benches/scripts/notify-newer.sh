# ublk, on a machine with Debian's newer kernel. The script's first part is load.sh.
SIZE=16M
[ "$MACHINE" != nested ] || (cd / && cpio -idu <"$IMAGES/initramfs-fio.cpio" 2>/dev/null)
echo "measure: machine $MACHINE"
nbd=''
walvisor disk create ublk.img --size $SIZE || exit 1
serve ublk ublk --control ublk.ctl --disk "backend=ram,size=$SIZE,queues=2,serial=ram" \
    --disk path=ublk.img,queues=2,serial=wal || exit 1
ublk_disk() { sed -n "s|^serving $backend: .* at /dev/||p" ublk.served; }
ublk_path() { measure ublk "$(ublk_disk)" "$backend" '' ublk; }
for round in $(seq "$ROUNDS"); do each_job ublk_path; done
stop ublk
