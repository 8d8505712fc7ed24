//! `walvisor-bench drbd`: the disk and its log on a block device that DRBD copies to a second machine.
//!
//! ```text
//!   mod.rs ─▶ matrix.rs    commits by round trip and clients  ─┐
//!             failover.rs  the primary dies under load        ─┴─▶ pair.rs ─▶ two guests, DRBD, netem, a cable
//! ```

mod failover;
mod matrix;
mod pair;

use clap::{Args, ValueEnum};
use walvisor::commands::CommandError;

use crate::output::{Output, chosen};
use crate::report::Section;
use failover::Failovers;
use matrix::LinkMatrix;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DrbdPart {
    /// No DRBD, DRBD disconnected, and round trips up to 20 ms, with 1 to 64 clients, grouping off and on
    Matrix,
    /// The primary is killed under load, and the other machine takes over
    Failover,
}

/// Arguments of `walvisor-bench drbd`.
#[derive(Debug, Args)]
pub struct DrbdArguments {
    /// Only these parts, with commas between
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART,PART")]
    only: Vec<DrbdPart>,
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench drbd`.
///
/// # Errors
/// If a program is missing, a machine or a measurement fails, a file can't be written, or a failover lost a commit.
pub fn run(arguments: &DrbdArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let parts = chosen(&arguments.only);
    let wanted = |part| parts.contains(&part);
    let mut matrix =
        wanted(DrbdPart::Matrix).then(|| LinkMatrix::new(output.quick, output.rounds(1, 1)));
    let mut failovers = wanted(DrbdPart::Failover).then(|| Failovers::new(output.rounds(5, 1)));
    let expected = [
        matrix.as_ref().map(LinkMatrix::expected),
        failovers.as_ref().map(Failovers::expected),
    ];
    let session = output.start(expected.into_iter().flatten().sum())?;
    let (mut sections, mut failed) = (Vec::new(), None);
    if let Some(matrix) = &mut matrix {
        failed = matrix.measure(&session, &output.dir).err();
        sections.push(matrix.section());
    }
    if let Some(failovers) = failovers.as_mut().filter(|_| failed.is_none()) {
        failed = failovers.measure(&session, &output.dir).err();
        sections.push(failovers.section());
    }
    // What was measured before a failure is still reported.
    let measured = |section: &Section| !section.table.rows.is_empty();
    if failed.is_none() || sections.iter().any(measured) {
        output.write("Group commit on a replicated disk: DRBD", session, sections)?;
    }
    if let Some(error) = failed {
        return Err(error);
    }
    match failovers.map_or(0, |failovers| failovers.lost_commits()) {
        0 => Ok(()),
        lost => Err(CommandError::Failed(format!(
            "{lost} acknowledged commits were lost in a failover"
        ))),
    }
}
