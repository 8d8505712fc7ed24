/* leap insert: the next midnight (UTC) has a second 23:59:60; leap clear: it has not.
 * Prints the offset of TAI, which such a second makes larger by one. */
#include <stdio.h>
#include <string.h>
#include <sys/timex.h>

int main(int count, char **arguments)
{
    struct timex state;
    memset(&state, 0, sizeof state);
    state.modes = ADJ_STATUS;
    state.status = count > 1 && !strcmp(arguments[1], "insert") ? STA_INS : 0;
    if (adjtimex(&state) < 0) {
        perror("adjtimex");
        return 1;
    }
    printf("%d\n", (int)state.tai);
    return 0;
}
