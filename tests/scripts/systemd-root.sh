# The root of a guest in which systemd is the first process: this machine's files without its own units, mounts and state,
# except for the list of installed packages. The job installs the package $PACKAGE. What the guest writes stays in its memory.
mount -t tmpfs memory /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work files /mnt/root
root=/mnt/root
: >$root/etc/fstab
mount -t tmpfs units $root/etc/systemd/system
mount -t tmpfs state $root/var/lib
mkdir -p $root/var/lib/dpkg/info $root/var/lib/dpkg/updates $root/var/lib/dpkg/triggers
cp /var/lib/dpkg/status $root/var/lib/dpkg/
cp "$PACKAGE" $root/root/walvisor.deb
cp "$JOB" $root/root/job
cat >$root/etc/systemd/system/job.service <<'END'
[Service]
ExecStart=/bin/sh /root/job
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
END
cat >$root/etc/systemd/system/job.target <<'END'
[Unit]
Requires=basic.target
Wants=job.service
After=basic.target
END
exec switch_root $root /lib/systemd/systemd --unit=job.target --log-target=journal --show-status=no
