//! The disk in the kernel's SCSI target beside tcmu-runner: the same fio jobs in turns, in one user-mode Linux over the files of
//! this machine. `walvisor serve tcmu` has its RAM backend, tcmu-runner its qcow handler over an image in memory, which is the
//! nearest to that of the handlers that Debian has.
//!
//! `cargo bench -p walvisor-benches --bench tcmu`; with `-- --json`, the same as JSON.

use std::error::Error;
use std::process::ExitCode;

use serde_json::{Value, json};
use walvisor_benches::spread::Spread;
use walvisor_guest_images::{Reporter, UserMode, install_missing, walvisor_binary};

/// How often both take turns, and for how many seconds each time.
const ROUNDS: usize = 5;
const TURN_S: usize = 2;

/// Both on one kernel. Each job prints who ran it, what it did, at which depth, and its operations a second.
const JOB: &str = r#"
# tcmu-runner looks for its kernel modules where a kernel of the machine's own would have them.
mkdir /run/lib /run/own
mount --bind /usr/lib /run/lib
ln -s /run/lib/* /run/own/
ln -sfn /run/lib/uml/modules /run/own/modules
mount --bind /run/own /usr/lib
mkdir -p /run/dbus /var/target/pr log /dev/shm
mount -t tmpfs memory /dev/shm
mount -t configfs configfs /sys/kernel/config
dbus-daemon --system --fork
tcmu-runner --tcmu-log-dir $PWD/log >runner.log 2>&1 &
sleep 2
qemu-img create -q -f qcow2 -o preallocation=full /dev/shm/disk.qcow2 64M
core=/sys/kernel/config/target/core/user_7/runner
loop=/sys/kernel/config/target/loopback/naa.5001405000000777/tpgt_1
mkdir -p $core
echo dev_config=qcow//dev/shm/disk.qcow2 >$core/control
echo dev_size=67108864,hw_block_size=512 >$core/control
echo 1 >$core/enable || { cat runner.log log/*; }
mkdir -p $loop
echo naa.5001405000000778 >$loop/nexus
mkdir $loop/lun/lun_0
ln -s $core $loop/lun/lun_0/runner
until runner=$(ls /sys/block | grep '^sd'); do sleep 0.2; done
"$WALVISOR" serve tcmu --disk backend=ram,size=64M,name=memory --metrics metrics >served 2>daemon.log &
until [ -s served ]; do sleep 0.2; done
walvisor=$(sed -n 's|.* at /dev/\(sd[a-z]*\) .*|\1|p' served)
for disk in $runner $walvisor; do dd if=/dev/zero of=/dev/$disk bs=1M count=64 oflag=direct 2>/dev/null; done
for round in $(seq $ROUNDS); do
    for kind in randread randwrite; do
        for depth in 1 32; do
            for who in walvisor runner; do
                eval disk=\$$who
                result=$(fio --name=job --filename=/dev/$disk --rw=$kind --bs=4k --direct=1 --ioengine=libaio \
                    --iodepth=$depth --runtime=$TURN --time_based --minimal 2>/dev/null | cut -d';' -f8,49 | tr ';' '+')
                echo "guest: job $who $kind $depth $(($result))"
            done
        done
    done
done
kill -TERM $!; wait $!
grep -E '^walvisor_tcmu_(commands|uio_wakes)_total' metrics | sed 's/^/guest: /'
"#;

const JOBS: [(&str, usize); 4] = [
    ("randread", 1),
    ("randread", 32),
    ("randwrite", 1),
    ("randwrite", 32),
];

struct Row {
    kind: &'static str,
    depth: usize,
    ours: Spread,
    theirs: Spread,
}

impl Row {
    fn ratio(&self) -> f64 {
        self.ours.median / self.theirs.median
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tcmu: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("tcmu-runner", "tcmu-runner"),
        ("dbus-daemon", "dbus"),
        ("qemu-img", "qemu-utils"),
        ("fio", "fio"),
        ("modprobe", "kmod"),
    ];
    install_missing(&needs, &Reporter::quiet(None))?;
    let walvisor = walvisor_binary("release")?;
    let dir = tempfile::tempdir()?;
    let script = format!(
        "WALVISOR={} ROUNDS={ROUNDS} TURN={TURN_S}\n{JOB}",
        walvisor.display()
    );
    let modules = ["configfs", "sd_mod", "uio", "target_core_user", "tcm_loop"];
    let guest = UserMode {
        modules: modules.map(str::to_owned).to_vec(),
        ..UserMode::default()
    };
    let mut guest = guest.boot_here(dir.path(), &script)?;
    let (mut results, mut counters) = (Vec::new(), Vec::new());
    loop {
        let line = guest.wait_for("guest: ")?;
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["guest:", "end"] => break,
            ["guest:", "job", who, kind, depth, rate] => {
                eprintln!("{who} {kind} {depth}: {rate}");
                let (depth, rate) = (depth.parse::<usize>()?, rate.parse::<f64>()?);
                results.push((who.to_owned(), kind.to_owned(), depth, rate));
            }
            ["guest:", _, value] => counters.push(value.parse::<f64>()?),
            _ => return Err(line.into()),
        }
    }
    guest.end()?;
    let spread = |who: &str, kind: &str, depth: usize| {
        let of = results.iter().filter(|result| {
            (result.0.as_str(), result.1.as_str(), result.2) == (who, kind, depth)
        });
        let rates: Vec<f64> = of
            .map(|result| result.3)
            .filter(|rate| *rate > 0.0)
            .collect();
        Spread::of(&rates).ok_or(format!("no result of {who}, {kind}, depth {depth}"))
    };
    let rows = JOBS
        .into_iter()
        .map(|(kind, depth)| {
            let (ours, theirs) = (
                spread("walvisor", kind, depth)?,
                spread("runner", kind, depth)?,
            );
            Ok::<_, String>(Row {
                kind,
                depth,
                ours,
                theirs,
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let [commands, wakes] = counters[..] else {
        return Err("no counters in the metrics".into());
    };
    match std::env::args().any(|argument| argument == "--json") {
        true => println!(
            "{}",
            serde_json::to_string_pretty(&to_json(&rows, wakes / commands))?
        ),
        false => print(&rows, wakes / commands),
    }
    Ok(())
}

fn print(rows: &[Row], wakes: f64) {
    println!(
        "a second: median of {ROUNDS} turns of {TURN_S} s (lowest to highest); 4 KiB, in user-mode Linux\n"
    );
    println!("| job | in flight | walvisor, RAM | tcmu-runner, qcow in memory | ratio |");
    println!("|---|---|---|---|---|");
    let spread = |of: &Spread| format!("{:.0} ({:.0} to {:.0})", of.median, of.min, of.max);
    for row in rows {
        println!(
            "| {} | {} | {} | {} | {:.2} |",
            row.kind,
            row.depth,
            spread(&row.ours),
            spread(&row.theirs),
            row.ratio()
        );
    }
    println!("\nwakes of the kernel a command, of all jobs: {wakes:.3}");
}

fn to_json(rows: &[Row], wakes: f64) -> Value {
    let spread = |of: &Spread| json!({"median": of.median, "min": of.min, "max": of.max});
    let row = |row: &Row| {
        json!({
            "job": row.kind,
            "depth": row.depth,
            "walvisor_per_s": spread(&row.ours),
            "peer_per_s": spread(&row.theirs),
            "ratio": row.ratio(),
        })
    };
    json!({
        "rounds": ROUNDS,
        "turn_s": TURN_S,
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
        "uio_wakes_per_command": wakes,
    })
}
