//! `walvisor archive plan`: what a month of an archive costs.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use walvisor_archive::{BUSY_CHECK, CHUNK_BYTES, IDLE_CHECK};

use super::time;
use crate::commands::disk::print;
use crate::size::{human_size, parse_size};

/// Thirty days.
const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);
/// As stores count.
const GIGABYTE: f64 = 1e9;

/// Arguments of `walvisor archive plan`.
#[derive(Clone, Copy, Debug, Args)]
pub struct PlanArguments {
    /// What the log gets each second, on the average: `walvisor ctl stats` and the metrics tell.
    /// Compression may halve it.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    log: u64,
    /// Bytes with data of all images.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    images: u64,
    /// What of the images has changed whenever they are copied again, in chunks of 4M.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    changed: u64,
    /// As of `push`.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1s")]
    interval: Duration,
    /// As of `push`.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "24h")]
    base_every: Duration,
    /// As of `expire`.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "30d")]
    keep: Duration,
    /// Price of 1000 requests that write. The prices are those of S3 in us-east-1, in dollars,
    /// unless you give yours.
    #[arg(long, value_name = "PRICE", default_value_t = 0.005)]
    put_price: f64,
    /// Price of 1000 requests that read.
    #[arg(long, value_name = "PRICE", default_value_t = 0.0004)]
    get_price: f64,
    /// Price of a gigabyte for a month.
    #[arg(long, value_name = "PRICE", default_value_t = 0.023)]
    store_price: f64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| error.to_string())
}

/// A month of an archive that is as old as it keeps.
#[derive(Debug, PartialEq)]
struct MonthlyUse {
    puts: f64,
    gets: f64,
    sent_bytes: f64,
    stored_bytes: f64,
}

impl MonthlyUse {
    fn of(plan: &PlanArguments) -> Self {
        let month = MONTH.as_secs_f64();
        let base_every = plan.base_every.as_secs_f64();
        let (log, changed) = (plan.log as f64, plan.changed as f64);
        let bases = month / base_every;
        // With parts, and without, a writer looks whether another has the archive.
        let (parts, looks_every) = if plan.log > 0 {
            let interval = plan.interval;
            (month / interval.as_secs_f64(), interval.max(BUSY_CHECK))
        } else {
            (0.0, IDLE_CHECK)
        };
        // Of the images one copy is whole, and the others share its chunks.
        let kept = plan.keep.as_secs_f64();
        let copies = (kept / base_every).ceil();
        Self {
            puts: parts + bases * (1.0 + plan.changed.div_ceil(CHUNK_BYTES) as f64),
            gets: month / looks_every.as_secs_f64(),
            sent_bytes: log * month + changed * bases,
            // The oldest point wants a copy that is older.
            stored_bytes: plan.images as f64 + changed * copies + log * (kept + base_every),
        }
    }

    /// The costs of requests and of storage.
    fn costs(&self, plan: &PlanArguments) -> (f64, f64) {
        (
            self.puts / 1000.0 * plan.put_price + self.gets / 1000.0 * plan.get_price,
            self.stored_bytes / GIGABYTE * plan.store_price,
        )
    }
}

/// Carries out `walvisor archive plan`.
pub fn run(plan: &PlanArguments) {
    let month = MonthlyUse::of(plan);
    let (requests, storage) = month.costs(plan);
    let cost = requests + storage;
    if plan.json {
        let line = json!({
            "puts": month.puts.round(),
            "gets": month.gets.round(),
            "sent_bytes": month.sent_bytes.round(),
            "stored_bytes": month.stored_bytes.round(),
            "first_bytes": plan.images,
            "cost": cost,
        });
        return print(format_args!("{line}\n"));
    }
    print(format_args!(
        "the first copy of the images: {}, {} PUTs\n\
         each month of 30 days, before compression: {} sent, {:.0} PUTs, {:.0} GETs\n\
         stored, once the archive is {} days old: {}\n\
         a month then costs {cost:.2}: {requests:.2} for requests, {storage:.2} for storage\n",
        human_size(plan.images),
        plan.images.div_ceil(CHUNK_BYTES),
        human_size(month.sent_bytes as u64),
        month.puts,
        month.gets,
        plan.keep.as_secs() / (24 * 3600),
        human_size(month.stored_bytes as u64),
    ));
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct PlanCommand {
        #[command(flatten)]
        plan: PlanArguments,
    }

    fn month(arguments: &str) -> (MonthlyUse, f64) {
        let words = arguments.split_whitespace();
        let plan = PlanCommand::parse_from(["plan"].into_iter().chain(words)).plan;
        let month = MonthlyUse::of(&plan);
        let (requests, storage) = month.costs(&plan);
        (month, requests + storage)
    }

    #[test]
    fn an_idle_log_costs_its_images_and_a_request_a_minute() {
        let (month, cost) = month("--log 0 --images 1G --changed 0");
        assert_eq!((month.puts, month.gets), (30.0, 43_200.0));
        assert_eq!(month.stored_bytes, f64::from(1 << 30));
        let wanted = 0.03 * 0.005 + 43.2 * 0.0004 + 1.073741824 * 0.023;
        assert!((cost - wanted).abs() < 1e-9, "{cost}");
    }

    #[test]
    fn a_longer_interval_costs_fewer_requests_for_the_same_bytes() {
        let (often, dearer) = month("--log 1M --images 100G --changed 4G");
        let (rarely, cheaper) = month("--log 1M --images 100G --changed 4G --interval 10s");
        assert_eq!(often.puts - rarely.puts, 0.9 * 30.0 * 24.0 * 3600.0);
        assert_eq!(often.stored_bytes, rarely.stored_bytes);
        assert!(cheaper < dearer);
        // 30 days of log and the day before them, and what has changed each day.
        let log = 31.0 * 24.0 * 3600.0 * f64::from(1 << 20);
        let images = (100_u64 + 30 * 4) << 30;
        assert_eq!(often.stored_bytes, log + images as f64);
    }
}
