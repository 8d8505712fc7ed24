//! What can be typed, for each page.

/// The examples of the page with this name.
pub fn of(page: &str) -> &'static [&'static str] {
    match page {
        "walvisor" => &[
            "walvisor disk create disk.img --size 1G",
            "walvisor run --kernel vmlinuz --initrd initrd.img --disk path=disk.img,transport=pci",
        ],
        "walvisor-run" => &[
            "walvisor run --kernel vmlinuz --initrd initrd.img --memory 1G --cpus 2 --disk \
             path=disk.img,transport=pci --net passt",
            "walvisor run --kernel vmlinuz --disk path=a.img --disk path=b.img,log=a.img.wal \
             --control ctl.sock --metrics-listen unix:metrics.sock",
        ],
        "walvisor-demo" => &["walvisor demo", "walvisor demo --conformance"],
        "walvisor-disk" => &[
            "walvisor disk create disk.img --size 1G",
            "walvisor disk info disk.img",
        ],
        "walvisor-disk-create" => &[
            "walvisor disk create disk.img --size 1G",
            "walvisor disk create b.img --size 1G --log disk.img.wal --retain 24h",
        ],
        "walvisor-disk-list" => &["walvisor disk list", "walvisor disk list disk.img.wal"],
        "walvisor-disk-info" => &["walvisor disk info disk.img"],
        "walvisor-disk-import" => &["walvisor disk import new.img raw.img"],
        "walvisor-disk-export" => &["walvisor disk export disk.img backup.img"],
        "walvisor-disk-checkpoint" => &["walvisor disk checkpoint disk.img"],
        "walvisor-disk-check" => &["walvisor disk check disk.img"],
        "walvisor-disk-discard" => &[
            "walvisor disk discard disk.img",
            "walvisor disk discard disk.img --yes",
        ],
        "walvisor-disk-adopt" => &[
            "walvisor disk adopt disk.img",
            "walvisor disk adopt disk.img --yes",
        ],
        "walvisor-disk-resize" => &["walvisor disk resize disk.img --size 2G"],
        "walvisor-disk-leave" => &["walvisor disk leave disk.img --log shared"],
        "walvisor-disk-move-log" => &["walvisor disk move-log disk.img shared"],
        "walvisor-disk-clone" => &["walvisor disk clone disk.img new.img"],
        "walvisor-disk-look" => &["walvisor disk look disk.img --at -15m --socket look.sock"],
        "walvisor-disk-restore" => &[
            "walvisor disk restore disk.img --at snapshot:evening -o before.img",
            "walvisor disk restore disk.img --at -15m --in-place",
        ],
        "walvisor-disk-changes" => &["walvisor disk changes disk.img --from snapshot:monday"],
        "walvisor-disk-snapshot" => &["walvisor disk snapshot disk.img evening"],
        "walvisor-disk-snapshots" => &["walvisor disk snapshots disk.img"],
        "walvisor-disk-snapshot-delete" => &["walvisor disk snapshot-delete disk.img evening"],
        "walvisor-disk-retain" => &["walvisor disk retain disk.img 24h"],
        "walvisor-disk-points" => &["walvisor disk points disk.img"],
        "walvisor-disk-mark" => &["walvisor disk mark disk.img 'before the upgrade'"],
        "walvisor-serve" => &[
            "walvisor serve --disk path=a.img,door=nbd,socket=nbd.sock --disk \
             path=b.img,log=a.img.wal,door=vhost-user,socket=b.sock",
            "walvisor serve --config pool.toml --control ctl.sock --metrics-listen 127.0.0.1:9790",
        ],
        "walvisor-serve-nbd" => &[
            "walvisor serve nbd --disk path=disk.img,socket=disk.sock",
            "walvisor serve nbd --disk path=disk.img,port=10809 --user nobody",
        ],
        "walvisor-serve-vhost-user" => {
            &["walvisor serve vhost-user --disk path=disk.img,socket=disk.sock,queues=2 --mode 660"]
        }
        "walvisor-serve-tcmu" => &[
            "walvisor serve tcmu --disk path=disk.img,fabric=loop",
            "walvisor serve tcmu --list",
        ],
        "walvisor-serve-ublk" => &[
            "walvisor serve ublk --disk path=disk.img,queues=2",
            "walvisor serve ublk --list",
        ],
        "walvisor-config" => &["walvisor config check pool.toml"],
        "walvisor-config-check" => &["walvisor config check pool.toml"],
        "walvisor-ctl" => &["walvisor ctl ctl.sock stats"],
        "walvisor-ctl-stats" => &[
            "walvisor ctl ctl.sock stats",
            "walvisor ctl ctl.sock stats --json",
        ],
        "walvisor-ctl-pause" => &[
            "walvisor ctl ctl.sock pause",
            "walvisor ctl ctl.sock pause --disk disk.img",
        ],
        "walvisor-ctl-resume" => &["walvisor ctl ctl.sock resume"],
        "walvisor-ctl-shutdown" => &["walvisor ctl ctl.sock shutdown"],
        "walvisor-ctl-limits" => {
            &["walvisor ctl ctl.sock limits --disk disk.img --ops-per-second 1000"]
        }
        "walvisor-ctl-cache" => &["walvisor ctl ctl.sock cache --disk disk.img writethrough"],
        "walvisor-ctl-exports" => &["walvisor ctl ctl.sock exports"],
        "walvisor-ctl-export-cancel" => &["walvisor ctl ctl.sock export-cancel disk.img"],
        "walvisor-ctl-looks" => &["walvisor ctl ctl.sock looks"],
        "walvisor-ctl-unlook" => &["walvisor ctl ctl.sock unlook look.sock"],
        "walvisor-ctl-add-disk" => {
            &["walvisor ctl ctl.sock add-disk path=vms/b.img,log=vms/log,socket=disks.sock"]
        }
        "walvisor-ctl-remove-disk" => &["walvisor ctl ctl.sock remove-disk b.img"],
        "walvisor-ctl-save-config" => &["walvisor ctl ctl.sock save-config pool.toml"],
        "walvisor-top" => &["walvisor top ctl.sock"],
        "walvisor-log" => &["walvisor log dump disk.img.wal"],
        "walvisor-log-dump" => &["walvisor log dump disk.img.wal"],
        "walvisor-log-resize" => &["walvisor log resize disk.img.wal --size 8G"],
        "walvisor-archive" => &[
            "walvisor archive push disk.img.wal s3://bucket/vm1 --follow",
            "walvisor archive restore s3://bucket/vm1 back --at -15m",
        ],
        "walvisor-archive-push" => &[
            "walvisor archive push disk.img.wal s3://bucket/vm1 --follow",
            "walvisor archive push disk.img.wal file:///mnt/backup/vm1",
        ],
        "walvisor-archive-status" => &["walvisor archive status s3://bucket/vm1"],
        "walvisor-archive-restore" => &[
            "walvisor archive restore s3://bucket/vm1 back --at time:2026-11-27T12:03:00Z",
            "walvisor archive restore s3://bucket/vm1 back --serve",
        ],
        "walvisor-archive-follow" => &["walvisor archive follow s3://bucket/vm1 /srv/vm1"],
        "walvisor-archive-promote" => &["walvisor archive promote s3://bucket/vm1 /srv/vm1"],
        "walvisor-archive-verify" => &["walvisor archive verify s3://bucket/vm1"],
        "walvisor-archive-plan" => {
            &["walvisor archive plan --log 200K --images 20G --changed 1G --interval 5s"]
        }
        "walvisor-archive-expire" => {
            &["walvisor archive expire s3://bucket/vm1 --keep 30d --keep-daily 90"]
        }
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory, Parser};
    use walvisor::cli::Cli;

    use super::of;

    fn check(command: &Command) {
        let name = command.get_display_name().unwrap_or(command.get_name());
        assert!(!of(name).is_empty(), "{name} has no example");
        for example in of(name) {
            let quoted = example.split('\'').enumerate();
            let words = quoted.flat_map(|(index, part)| match index % 2 {
                0 => part.split_whitespace().collect(),
                _ => vec![part],
            });
            if let Err(error) = Cli::try_parse_from(words) {
                panic!("{example}: {error}");
            }
        }
        let shown = |command: &&Command| !command.is_hide_set();
        command.get_subcommands().filter(shown).for_each(check);
    }

    #[test]
    fn each_page_has_examples_that_can_be_typed() {
        let mut walvisor = Cli::command().disable_help_subcommand(true);
        walvisor.build();
        check(&walvisor);
    }
}
