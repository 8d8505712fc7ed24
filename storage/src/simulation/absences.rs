//! A port in a random history whose owner goes away between a request and its completion: it drops
//! the port, never polls it again, or sleeps.
//!
//! Whatever the port has begun, all others become idle without it. What a sleeper is owed is there
//! when it comes back. What nobody will ask for may or may not have happened, as after a kill.

use super::clients::Clients;
use super::fixture::RunningStore;
use super::history::History;
use super::oracle::Violation;
use super::trace;

#[derive(Clone, Copy, Debug)]
enum AbsenceKind {
    /// The port is dropped, and another one opened.
    Dropped,
    /// The port is never polled again, and still there when the log closes.
    Forever,
    /// The port is polled again once all others are idle.
    Asleep,
}

/// When the owner of a port goes away, and for how long.
pub(super) struct Absence {
    kind: AbsenceKind,
    which: usize,
    /// It begins once this many requests were submitted.
    from: u64,
    /// This many were submitted when it ends.
    to: u64,
    /// Steps that it lasts at least.
    least: u64,
    /// The step with which it began, and how many requests of the port had not ended then.
    began: Option<(u64, usize)>,
}

impl History {
    /// Plans an absence for some of the histories.
    pub(super) fn plan_absence(&mut self, ports: usize, requests: u64) -> Option<Absence> {
        let acts = &mut self.acts;
        if !self.lively || !acts.one_in(2) {
            return None;
        }
        let kind = match acts.below(3) {
            0 => AbsenceKind::Dropped,
            1 => AbsenceKind::Forever,
            _ => AbsenceKind::Asleep,
        };
        let from = acts.below(requests);
        let left = requests - from;
        Some(Absence {
            kind,
            which: acts.below(ports as u64) as usize,
            from,
            to: match kind {
                AbsenceKind::Asleep => from + 1 + acts.below(left),
                _ => requests,
            },
            least: if acts.one_in(8) {
                1001 + acts.below(1000)
            } else {
                acts.below(32)
            },
            began: None,
        })
    }

    /// Begins or ends an absence when that is due. Returns how many requests may be submitted while
    /// it lasts.
    pub(super) fn keep_away(
        &mut self,
        absence: &mut Option<Absence>,
        clients: &mut Clients,
        running: &RunningStore,
        step: u64,
        submitted: u64,
    ) -> Result<Option<u64>, Violation> {
        let Some(planned) = absence else {
            return Ok(None);
        };
        let which = planned.which;
        let Some((began, owed)) = planned.began else {
            if submitted >= planned.from && clients.is_open(which) {
                let owed = self.go_away(planned.kind, clients, which, running)?;
                planned.began = Some((step, owed));
            }
            return Ok(None);
        };
        let others = !clients.all_closed();
        let over = step - began >= planned.least && self.oracle.is_idle_without(which);
        if !over || others && submitted < planned.to {
            return Ok(Some(planned.to));
        }
        let counts = u64::from(owed > 0 && others);
        match planned.kind {
            AbsenceKind::Dropped => self.totals.dropped += u64::from(owed > 0),
            AbsenceKind::Forever => self.totals.abandoned += counts,
            AbsenceKind::Asleep => {
                clients.away = None;
                self.totals.slept += counts;
                self.totals.slept_long += counts * u64::from(step - began > 1000);
            }
        }
        trace(|| {
            format!(
                "all others are idle {} steps after port {which} was left",
                step - began
            )
        });
        *absence = None;
        Ok(None)
    }

    /// The owner of a port submits some requests, and goes away. Returns how many of its requests
    /// have not ended.
    fn go_away(
        &mut self,
        kind: AbsenceKind,
        clients: &mut Clients,
        which: usize,
        running: &RunningStore,
    ) -> Result<usize, Violation> {
        for _ in 0..1 + self.acts.below(8) {
            // As in `work`.
            if self.oracle.excused > 0 || self.acts.one_in(4) {
                self.serve(clients, which, running)?;
            }
            self.submit(clients, which, running);
        }
        if !self.acts.one_in(4) {
            clients.kick(which);
        }
        let owed = self.oracle.owed(which);
        trace(|| format!("port {which} is left, {kind:?}, with {owed} requests"));
        match kind {
            AbsenceKind::Dropped => {
                clients.replace(running, which);
                self.oracle.forget(which);
            }
            AbsenceKind::Forever => {
                clients.away = Some(which);
                self.oracle.forget(which);
            }
            AbsenceKind::Asleep => clients.away = Some(which),
        }
        Ok(owed)
    }
}
