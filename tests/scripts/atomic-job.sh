# A guest with Debian's newer kernel, and two SCSI disks of `walvisor run`.
IMAGES=$JOB
walvisor disk create mmio.img --size 32M || exit
walvisor disk create pci.img --size 32M || exit
guest_initrd atomic.initrd "$JOB/guest.sh"
run_guest atomic 180 --kernel "$IMAGES/vmlinuz" --initrd atomic.initrd --memory 512M \
    --cmdline 'console=ttyS0 quiet mitigations=off panic=-1 reboot=t' --metrics "$RESULTS/atomic.prom" \
    --disk path=mmio.img,device=scsi,transport=mmio --disk path=pci.img,device=scsi,transport=pci
echo "job: guest: status $?"
for disk in mmio pci; do
    walvisor disk check $disk.img
    echo "job: check of $disk.img: status $?"
done
